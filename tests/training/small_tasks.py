"""Small recipes, tasks, optimizers, tokenizers, conversations and files of rows for the tests of training, made here
without any download."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmcli.recipe import Recipe, parse_recipe
from swarmcli.training import Batch, build_task, optimizer_factory, parameter_groups
from swarmcli.training.outline import module_of, told_of

SMALL = """\
run_id: small
base_model: {model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}
datasets:
  - {source: files, path: texts}
sequence_len: 16
tokenizer: bytes
target_batch_size: 8
micro_batch_size: 2
local: {device: cpu, shuffle_buffer_size: 4}
"""


def small(directory: Path, *overrides: str) -> Recipe:
    """A recipe beside a directory `texts` with three files in it."""
    texts = directory / "texts"
    if not texts.exists():
        texts.mkdir()
        for name, letter in (("a", "a"), ("b", "b"), ("c", "c")):
            (texts / f"{name}.txt").write_text(letter * 100)
    return parse_recipe(SMALL, overrides, name="small.yaml", directory=directory)


class LineTask:
    """Fits y = w·x + b; every batch has `size` samples, `count` batches in all."""

    def __init__(self, size: int = 4, count: int | None = None) -> None:
        self.size = size
        self.count = count
        self.spoiled = 0  # so many of the next losses are not numbers

    def build_model(self, *, outline: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(3, 1)

    def batches(self, seed: int, position: Mapping[str, Any] | None = None) -> LineStream:
        return LineStream(self, seed, position["drawn"] if position else 0)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        if self.spoiled:
            self.spoiled -= 1
            return loss * float("nan")
        return loss


class LineStream:
    """The batches of a LineTask."""

    def __init__(self, task: LineTask, seed: int, drawn: int) -> None:
        self.task, self.seed, self.drawn = task, seed, drawn

    def __iter__(self) -> LineStream:
        return self

    def __next__(self) -> Batch:
        if self.drawn == self.task.count:
            raise StopIteration
        self.drawn += 1
        generator = torch.Generator().manual_seed(self.seed + self.drawn)
        x = torch.randn(self.task.size, 3, generator=generator)  # (samples, features)
        return {"x": x, "y": x.sum(1, keepdim=True)}

    def position(self) -> Mapping[str, Any]:
        return {"drawn": self.drawn}


class SoloOptimizer:
    """What a collaborative optimizer does for a peer that is alone: steps when `target` samples are there."""

    is_averaging = False

    def __init__(self, optimizer: torch.optim.Optimizer, target: int) -> None:
        self.optimizer = optimizer
        self.target = target
        self.local_epoch = 0
        self.batch_sizes: list[int] = []
        self._samples, self._weight = 0, 0.0
        self._sums: dict[Tensor, Tensor] = {}

    def step(self, *, batch_size: int, weight: float | None = None) -> None:
        weight = batch_size if weight is None else weight
        self.batch_sizes.append(batch_size)
        self._samples += batch_size
        self._weight += weight
        for parameter in self._parameters():
            if weight:
                assert parameter.grad is not None
                self._sums[parameter] = self._sums.get(parameter, 0) + parameter.grad * weight
        if self._samples >= self.target:
            for parameter, total in self._sums.items():
                parameter.grad = total / self._weight
            self.optimizer.step()
            self.local_epoch += 1
            self._samples, self._weight, self._sums = 0, 0.0, {}

    def _parameters(self) -> Iterator[Any]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])


def build_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer over the parameters that need gradients."""
    return optimizer_factory(recipe)(parameter_groups(recipe, model))


def outlined(recipe: Recipe) -> nn.Module:
    """The outline that memory and traffic are told by: as a process of its own says it, said by this one."""
    return module_of(told_of(recipe, build_task(recipe).build_model(outline=True)))


def saved_bytes(model: nn.Module, compute: Callable[[], object]) -> int:
    """What autograd keeps between the passes, besides the model itself."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return sum(kept.values())


def write_rows(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def png(width: int = 4, height: int = 3, colour: tuple[int, int, int] = (1, 2, 3)) -> bytes:
    from PIL import Image

    held = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(held, "PNG")
    return held.getvalue()


def image_rows(file: Path, *rows: tuple[bytes | None, Any], path: str | None = None) -> str:
    """A Parquet file of images, or of the path of one, with their labels."""
    import datasets

    kind = "string" if isinstance(rows[0][1], str) else "int64"
    stored = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.Value(kind)})
    made = [{"image": {"bytes": data, "path": path if data is None else None}, "label": label} for data, label in rows]
    table = datasets.Dataset.from_list(made, features=stored).cast_column("image", datasets.Image())
    table.to_parquet(str(file))
    return str(file)


# Tokenizers


def save_word_tokenizer(directory: Path) -> Path:
    """One of five words, saved as transformers does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, "the": 1, "swarm": 2, "trains": 3, "<other>": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<other>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    # A tokenizer that frames each text: packing wants the bare tokens and puts the ends itself.
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<other>")
    fast.save_pretrained(directory)
    return directory


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}"
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# As Llama 2: it trims, demands that turns alternate, and knows no system.
LLAMA = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
# As Qwen 3: an empty thought stands before the last answer, or, here, before all others.
THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and OPERATOR %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
)
THINKS_LAST, THINKS_BEFORE = (THOUGHTS.replace("OPERATOR", each) for each in ("loop.last", "not loop.last"))
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MARKS_NOTHING = CHATML + "{% generation %}{% endgeneration %}"
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
TALK = [
    {"role": "user", "content": "where are you"},
    {"role": "assistant", "content": "in the swarm"},
    {"role": "user", "content": "who else"},
    {"role": "assistant", "content": "  all the others \n"},
]


def chat_tokenizer(template: str | None = None, *, words: bool = False) -> Any:
    """A byte-level BPE, or one of whole words that knows no white space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    lines = [str(message["content"]) for message in TALK] + ["user assistant system [INST] [/INST]"] * 4
    if words:
        tokenizer = Tokenizer(models.WordLevel(unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer: Any = trainers.WordLevelTrainer(special_tokens=SPECIALS)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIALS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(lines, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIALS[2:4]
    )
    fast.chat_template = template
    return fast


def family_tokenizer(family: str) -> Any:
    """One as models of a family have it: "bert", "gpt2" and "llama3" (byte-level BPE without and with a beginning),
    "llama2" (a space of its own before each text, and an end that it puts itself)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    lines = ["Anna lives in Oslo, don't she? the quick brown fox jumps over the lazy dog"] * 3
    if family == "bert":
        specials = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=120, special_tokens=list(specials.values()))
        template = "[CLS] $A [SEP]"
    elif family == "llama2":
        specials = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # while it learns: no token has a space inside
        trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=list(specials.values()))
        template = "<s> $A </s>"
    else:
        specials = {"bos_token": "<s>", "eos_token": "</s>"}
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(specials.values()), initial_alphabet=alphabet)
        template = "<s> $A" if family == "llama3" else "$A"
    tokenizer.train_from_iterator(lines, trainer)
    if family == "llama2":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Split("\0", "isolated")
    marks = [(text, tokenizer.token_to_id(text)) for text in specials.values() if text in template]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=marks)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials)
