"""Recipes with comments, as `swarm init` writes them: one text for models of several sizes that go on with texts, and
the shipped recipe of each other task, with what is the run's own in its places."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from swarmcli.recipe.advice import OPTIONS, Advice, Volunteers, advise

SizeName = Literal["small", "medium", "gpt2", "home", "slow-links"]
TaskTemplateName = Literal[
    "chat", "lora", "sequence-classification", "token-classification", "seq2seq", "masked-lm", "image-classification"
]
TemplateName = Literal[SizeName, TaskTemplateName]
STDLIB = "stdlib"  # what `data` says for the sources of Python's own standard library, and for rows made of them
SHIPPED = Path(__file__).parents[1] / "shipped"  # recipes/, which a checkout links to and a wheel brings along


@dataclass(frozen=True, slots=True)
class TaskTemplate:
    """A shipped recipe that is one to begin with."""

    learned: str  # in words, as an answer to the question what the model should learn
    toy: str = ""  # its small data, a file or directory that make_data makes; "": it reads the standard library itself
    labels: str = ""  # the column that holds names of classes
    reads: Literal["texts", "rows", "images"] = "rows"


TASK_TEMPLATES: Mapping[str, TaskTemplate] = {
    "chat": TaskTemplate("follow instructions (chat)", "chats.jsonl"),
    "lora": TaskTemplate(
        "something more beside a saved model, which stays as it is (LoRA)", "names.jsonl", "", "texts"
    ),
    "sequence-classification": TaskTemplate("classify texts", "statements.jsonl", "label"),
    "token-classification": TaskTemplate("label the words of texts", "tokens.jsonl", "tags"),
    "seq2seq": TaskTemplate("turn a text into another", "names.jsonl"),
    "masked-lm": TaskTemplate("fill gaps in texts", reads="texts"),
    "image-classification": TaskTemplate("classify images", "shapes", "label", "images"),
}


@dataclass(frozen=True, slots=True)
class Template:
    """The kind of a run. Sizes fit the computers that `about` names."""

    about: str
    parameters: int
    layers: int
    heads: int
    width: int
    initializer_range: str  # of the first weights: the narrower a model is, the larger
    sequence_len: int
    target_batch_size: int
    micro_batch_size: int
    max_epochs: int
    learning_rate: str
    warmup_epochs: int
    saved_every: int  # epochs
    evaluated_every: int  # epochs
    volunteers: Volunteers | None = None  # whose links the run has to get by with; None: gradients travel as they are


SMALL = Template(
    "a model of 0.4 million parameters that any laptop trains in minutes, to see how everything works",
    parameters=471_296,
    layers=2,
    heads=4,
    width=128,
    initializer_range="0.06",
    sequence_len=64,
    target_batch_size=512,
    micro_batch_size=16,
    max_epochs=60,
    learning_rate="3e-3",
    warmup_epochs=10,
    saved_every=20,
    evaluated_every=5,
)
MEDIUM = Template(
    "a model of 11 million parameters for laptops and desktop computers, in hours to days",
    parameters=10_944_768,
    layers=6,
    heads=6,
    width=384,
    initializer_range="0.03",
    sequence_len=256,
    target_batch_size=512,
    micro_batch_size=8,
    max_epochs=2000,
    learning_rate="1e-3",
    warmup_epochs=100,
    saved_every=50,
    evaluated_every=25,
)
AT_HOME = Volunteers(uplink=10e6 / 8, count=4, pace=4.0)  # as fast as a laptop with two cores trains MEDIUM
HOME = replace(
    MEDIUM,
    about="as medium, for usual lines of homes, 10 Mbit/s up and more: gradients travel in 8 bits",
    volunteers=AT_HOME,
)
TEMPLATES: Mapping[str, Template] = {
    "small": SMALL,
    "medium": MEDIUM,
    "gpt2": Template(
        "a model of the size of GPT-2, 86 million parameters, for computers with a graphics card",
        parameters=86_240_256,
        layers=12,
        heads=12,
        width=768,
        initializer_range="0.02",
        sequence_len=1024,
        target_batch_size=512,
        micro_batch_size=4,
        max_epochs=10_000,
        learning_rate="6e-4",
        warmup_epochs=500,
        saved_every=200,
        evaluated_every=100,
    ),
    "home": HOME,
    "slow-links": replace(
        HOME,
        about="as medium, for slower lines: peers step by themselves, and average every 15 steps how far they went",
        volunteers=replace(AT_HOME, uplink=2e6 / 8),
    ),
}


def compose(
    file: str,
    run_id: str,
    *,
    template: TemplateName = "small",
    data: str = STDLIB,
    data_dir: str = "",
    base_model: str = "",
    revision: str = "",
    public: str = "",
    key: str = "",
    labels: Sequence[str] = (),
    fit: bool = True,
) -> str:
    """The text of a recipe. `file`: as which it is spoken of in comments. `data`: STDLIB, a directory with texts
    ("./texts"), or else the name of a dataset on the Hub ("owner/name"). `data_dir`: where "./texts" begins on this
    computer; "": beside the recipe. `base_model`: a model of the Hub, at the commit `revision`; "": one of the
    template's size with random weights. `public`: the run key of a closed run, the other half of which is in the file
    `key`; "" for an open one. `labels`: of the classes in `data`, for a task that has such; (): they are not known.
    `fit`: whether a template with `volunteers` trains as their links allow."""
    access = _INVITE.format(file=file, key=key, public=public) if public else _OPEN
    local = _LOCAL.format(data_dir=json.dumps(data_dir, ensure_ascii=False)) if data_dir else ""
    if template in TASK_TEMPLATES:
        text = _of_task(template, file, data, labels, base_model, revision)
        return text.replace(f"run_id: {template}\n", f"run_id: {run_id}\n\n{access}\n", 1) + local
    chosen = TEMPLATES[template]
    if base_model:
        chosen = replace(chosen, about=f"{base_model} of the Hugging Face Hub, trained further", learning_rate="2e-5")
    text = _TEXT.format(
        file=file,
        run_id=run_id,
        access=access,
        model=(_PRETRAINED if base_model else _CONFIG).format(
            base_model=base_model, revision=revision, **asdict(chosen)
        ),
        data=_data(data),
        evaluation="" if _on_hub(data) else _EVALUATION.format(every=chosen.evaluated_every),
        local=local,
        **asdict(chosen),
    )
    if chosen.volunteers is None or not fit:
        return text
    size = chosen.parameters, chosen.target_batch_size, chosen.micro_batch_size
    return fitted(text, advise(*size, chosen.volunteers), by_muon=not base_model)


def fitted(text: str, advice: Advice, *, by_muon: bool, least_epochs: int = 20) -> str:
    """The text of a recipe that trains as the links of its volunteers allow, with the arithmetic in a comment. Of
    epochs that have more samples there are fewer, but `least_epochs`: with fewer rounds peers learn apart. `by_muon`:
    own steps are Muon's in place of AdamW's, for a language model that begins with random weights."""
    chosen = advice.chosen

    def fewer(found: re.Match[str]) -> str:
        least = least_epochs if found[1] == "max_epochs: " else 1
        return found[1] + str(max(least, int(found[2]) * advice.batch // chosen.samples))

    if chosen.samples > advice.batch:
        text = re.sub(r"(?m)^( *(?:max|warmup|every)_epochs: )(\d+)", fewer, text)
    if by_muon and chosen.way.steps > 1:
        _, rate, _ = re.split(r"(?m)^  learning_rate: (\S+)$", text, maxsplit=1)
        rate = f"{OPTIONS.rate_of_muon * float(rate):.1g}"
        text = _replaced("^  name: adamw$", "  name: muon              # makes up for what rare rounds lose", text)
        text = _replaced(r"^  learning_rate: \S+$", f"  learning_rate: {rate}", text)
    text = _replaced(r"^target_batch_size: \d+", f"target_batch_size: {chosen.samples}", text)
    lines = [*(f"# {line}" for line in advice.lines), *chosen.sections, ""]
    return _replaced("^(?=checkpoint:)", "\n".join(lines), text)


def _of_task(template: str, file: str, data: str, labels: Sequence[str], base_model: str, revision: str) -> str:
    """The shipped recipe, without the line for editors and what one does first in a checkout."""
    task = TASK_TEMPLATES[template]
    text = (SHIPPED / f"{template}.yaml").read_text(encoding="utf-8").partition("\n")[2]
    first = f"# docs/recipes.md tells every key; `swarm validate {file}` checks this file without any network.\n"
    if data == STDLIB and task.toy:
        first += f"# Its small data are made by: python -m swarmcli.shipped.make_data DIRECTORY/data {task.toy}\n"
    elif not _on_hub(data) and data != STDLIB:
        first += "# Each trainer needs the data on its own computer; `swarm join` says where.\n"
    if template == "lora":
        first += "# What the base is, all peers have to agree on: it tells the line frozen_weights, to be added here.\n"
    text = re.sub("(?m)^# First: .*\n(?:#(?! Of real size).*\n)*", "", text)
    text = _replaced("(?=# Of real size)", first, text)
    text = _replaced("output_dir: .*", "output_dir: runs", text)
    if data != STDLIB and task.reads == "texts":
        text = _replaced("(?<=datasets:\n)(?:  .*\n)+", _data(data) + "\n", text)
    elif data != STDLIB:
        path = json.dumps(data, ensure_ascii=False)
        images = (
            f"path: {path}" if _on_hub(data) else f"path: imagefolder\n    data_files: [{json.dumps(data + '/**')}]"
        )
        at = r"path: imagefolder.*\n    data_files: .*" if task.reads == "images" else r"path: data/\S+"
        text = _replaced(at, images if task.reads == "images" else f"path: {path}", text)
    if data != STDLIB and task.labels:
        names = json.dumps(list(labels), ensure_ascii=False) if labels else _LABELS
        text = _replaced("labels: .*", f"labels: {names}", text)
    if base_model:
        model = _PRETRAINED.format(base_model=base_model, revision=revision).rstrip()
        text = _replaced("base_model:.*(?:\n  .*)*", model, text)
        text = re.sub("(?m)^tokenizer: bytes\n", "", text)
        text = re.sub("(?m)^chat_template: ", "# if the model has no template of its own: chat_template: ", text)
        text = re.sub("(?m)^lora_target_modules: .*", "lora_target_modules: all-linear", text)
        text = _replaced("  learning_rate: .*", f"  learning_rate: {'2e-4' if template == 'lora' else '2e-5'}", text)
    return text


def _replaced(pattern: str, new: str, text: str) -> str:
    """Replaces the first place that fits, which a shipped recipe always has (tests/cli/test_init.py)."""
    return re.sub(f"(?m){pattern}", lambda _: new, text, count=1)


def _on_hub(data: str) -> bool:
    """A path is written with a dot, a slash or a drive in front, as `init` writes it; a dataset never is."""
    return data != STDLIB and not data.startswith((".", "/", "~", "\\")) and ":" not in data


def _data(data: str) -> str:
    if data == STDLIB:
        return "  - source: stdlib          # or files (path, glob), or huggingface (path, split, field)"
    if _on_hub(data):
        return (
            f"  - source: huggingface     # streamed; each trainer needs: pip install 'swarmcli[datasets]'\n"
            f"    path: {json.dumps(data)}\n    field: text"
        )
    return (
        "  # Each trainer needs these texts on its own computer; `swarm join` says where.\n"
        f'  - source: files\n    path: {json.dumps(data, ensure_ascii=False)}\n    glob: "**/*"'
    )


_TEXT = """\
# A run of swarm: {about}.
# docs/recipes.md tells every key; `swarm validate {file}` checks this file without any network.
run_id: {run_id}

{access}
{model}datasets:
{data}
sequence_len: {sequence_len:<11} # tokens per sample

# All peers together compute so many samples, then average what they learned and step: that is an epoch.
target_batch_size: {target_batch_size}
micro_batch_size: {micro_batch_size:<7} # per forward pass; each volunteer may choose another: local.micro_batch_size
max_epochs: {max_epochs:<13} # of the whole run
seed: 1
output_dir: runs          # journals, checkpoints and identities of the peers of this computer

optimizer:
  name: adamw
  learning_rate: {learning_rate}
  betas: [0.9, 0.95]
  max_grad_norm: 1.0
lr_scheduler:
  name: cosine
  warmup_epochs: {warmup_epochs}
  min_lr_ratio: 0.1
checkpoint:
  every_epochs: {saved_every}
{evaluation}{local}"""
_CONFIG = """\
# What is trained: a config of transformers, the directory of a saved model, or one of the Hugging Face Hub.
base_model:
  model_type: gpt2
  n_layer: {layers}
  n_head: {heads}
  n_embd: {width}
  n_positions: {sequence_len}
  resid_pdrop: 0.0
  embd_pdrop: 0.0
  attn_pdrop: 0.0
  # The narrower a model is, the larger its first weights have to be, or its loss jumps while the rate is highest.
  initializer_range: {initializer_range}
  tie_word_embeddings: false
tokenizer: bytes          # or a directory with a saved tokenizer
"""
_PRETRAINED = """\
# What is trained: a model of the Hugging Face Hub as it is at this commit, with its own tokenizer.
base_model: {base_model}
revision: {revision}
"""
_LABELS = "[first, second]   # write the names of the classes in your data"
_OPEN = """\
# Whoever has a link takes part. `swarm init --invite` begins a run that asks for invitations.
access: open
"""
_INVITE = """\
# Only whom you invite takes part: `swarm invite {file}`. The other half of this key is in {key}:
# keep that file, give it to nobody, and make a copy of it; without it nobody can be invited or revoked any more.
access: invite
run_key: {public}
"""
_EVALUATION = """\
evaluation:               # on a share of the texts that nobody trains on
  held_out: 0.02
  every_epochs: {every}
"""
_LOCAL = """\
local:                    # of this computer alone, and in no link: each volunteer has a place of its own
  data_dir: {data_dir}
"""
