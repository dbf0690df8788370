"""One rule for sums, whatever the task: the mean over all that a step learns, however it is cut into micro-batches."""

from __future__ import annotations

import re
import threading
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmcli.errors import RecipeError
from swarmcli.recipe import Recipe
from swarmcli.training import Compute, LoopSettings, TrainingLoop, build_task, evaluate
from swarmcli.training.tasks import causal_lm

from . import test_row_tasks
from .small_tasks import TALK, write_rows

GPT2 = "{model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}"
BART = (
    "{model_type: bart, d_model: 16, decoder_layers: 1, decoder_attention_heads: 2, decoder_ffn_dim: 16, dropout: 0.0, "
    "is_decoder: true}"
)
MIXTRAL = (
    "{model_type: mixtral, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, "
    "intermediate_size: 16, num_local_experts: 4, output_router_logits: true, router_aux_loss_coef: 0.5}"
)
TEXTS = [{"text": "ab" * (1 + 3 * n), "messages": TALK[: 2 + 2 * (n % 2)]} for n in range(8)]


def recipe_for(directory: Path, task: str, model: str, rows: Any, *overrides: str) -> Recipe:
    write_rows(directory / "rows.jsonl", *rows)
    length = [] if task == "image_classification" else ["sequence_len=96"]
    return test_row_tasks.recipe_for(task, model, directory, *length, *overrides)


@pytest.mark.parametrize("kind", ["text", "completion", "chat_template"])
@pytest.mark.parametrize("more", ["sample_packing=true", "label_smoothing_factor=0.1"])
def test_what_routers_add_to_the_loss_is_kept_and_padding_is_not_routed(tmp_path: Path, kind: str, more: str) -> None:
    overrides = [f"datasets.0.type={kind}", *(["chat_template=chatml"] if kind == "chat_template" else []), more]
    task: Any = build_task(recipe_for(tmp_path, "causal_lm", MIXTRAL, TEXTS, *overrides))
    model, batch = task.build_model(), dict(next(task.batches(1)))
    # The load that the Mixtral paper balances, of plain transformers: without padding, and without labels.
    if "position_ids" in batch:
        del batch["attention_mask"]
    labels = batch.pop("labels", batch["input_ids"])[:, 1:]
    outputs = model(**batch)
    expected = functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels.flatten(), label_smoothing=task.recipe.label_smoothing_factor
    )
    assert outputs.aux_loss > 1
    torch.testing.assert_close(
        task.loss(model, next(task.batches(1))), expected + 0.5 * outputs.aux_loss, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["text", "completion"])
def test_a_decoder_that_leaves_labels_in_their_place_learns_the_next_token(tmp_path: Path, kind: str) -> None:
    task: Any = build_task(recipe_for(tmp_path, "causal_lm", BART, TEXTS, f"datasets.0.type={kind}"))
    model, batch = task.build_model(), next(task.batches(1))
    labels = batch.get("labels", batch["input_ids"])[:, 1:]
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    torch.testing.assert_close(
        task.loss(model, batch), functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    )


def test_all_decoders_that_leave_labels_in_their_place_are_known() -> None:
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as listed

    models = Path(str(find_spec("transformers").origin)).parent / "models"  # type: ignore[union-attr]
    found = set()
    for name, model in listed.items():
        for file in (models / model_type_to_module_name(name)).glob("modeling_*.py"):
            body = re.search(rf"\nclass {model}\(.*?(?=\nclass |\Z)", file.read_text(), re.DOTALL)
            if body and "loss_function(" not in body[0]:
                found.add(name)
    composite = {"gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}  # refused
    assert found == {*causal_lm._LABELS_IN_PLACE, *causal_lm._PADS_IN_FRONT, "xlm", "xlnet"} | composite


class Gradient:
    """In the place of a collaborative optimizer: keeps the first step's gradients, samples and weight."""

    is_averaging = False
    local_epoch = 0

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def step(self, *, batch_size: int, weight: float | None = None) -> None:
        self.local_epoch += 1
        self.samples, self.weight = batch_size, weight
        self.of = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self._model.parameters()]


def one_step(task: Any, micro_batches: int) -> tuple[Gradient, list[float]]:
    """The gradient of a step, and the loss that screens show of it."""
    losses: list[float] = []
    model = task.build_model()
    step = Gradient(model)
    settings = LoopSettings(stream_seed=1, accumulation_steps=micro_batches, batches_ahead=0)
    loop = TrainingLoop(
        task, model, step, settings, on_loss=lambda loss, weight: losses.append(loss), last_epoch=lambda: 1
    )
    loop.run(threading.Event())
    return step, losses


BERT = (
    "{model_type: bert, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16, "
    "hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0, initializer_range: 0.5}"
)
FNET = (
    "{model_type: fnet, hidden_size: 16, num_hidden_layers: 1, intermediate_size: 16, hidden_dropout_prob: 0.0, "
    "initializer_range: 0.5}"
)
FUNNEL = (
    "{model_type: funnel, d_model: 16, n_head: 2, d_head: 8, d_inner: 16, block_sizes: [1, 1], num_decoder_layers: 1, "
    "hidden_dropout: 0.0, attention_dropout: 0.0}"
)
XLNET = "{model_type: xlnet, d_model: 16, n_layer: 1, n_head: 2, d_inner: 16, dropout: 0.0, summary_last_dropout: 0.0}"
T5 = "{model_type: t5, d_model: 16, d_kv: 8, d_ff: 16, num_layers: 1, num_heads: 2, dropout_rate: 0.0}"
TAGS = [{"tokens": ["A"] * (1 + 8 * (n % 2)), "tags": ["y"] + ["x"] * 8 * (n % 2)} for n in range(8)]
PAIRS = [{"source": f"s{n}", "target": "ab" * (1 + 13 * (n % 2))} for n in range(8)]


@pytest.mark.parametrize(
    ("name", "model", "rows", "more"),
    [
        ("seq2seq", T5, PAIRS, []),
        ("token_classification", BERT, TAGS, ["labels=[x, y]"]),
        ("causal_lm", GPT2, TEXTS, ["datasets.0.type=chat_template", "chat_template=chatml"]),
        # Padding behind a text changes what these models tell of it.
        ("token_classification", FNET, TAGS, ["labels=[x, y]"]),
        ("token_classification", FUNNEL, TAGS, ["labels=[x, y]"]),
    ],
)
def test_a_step_is_the_mean_over_all_that_it_learns_however_it_is_cut(
    tmp_path: Path, name: str, model: str, rows: Any, more: list[str]
) -> None:
    alone: Any = build_task(recipe_for(tmp_path, name, model, rows, "micro_batch_size=1", *more))
    plain, batches = alone.build_model(), list(islice(alone.batches(1), 8))
    total, count = torch.zeros(()), 0
    for batch in batches:
        logits, labels = alone.answers(alone.outputs(plain, batch).logits, batch)
        total = total + functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count += int((labels != -100).sum())
    (total / count).backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters()]
    evaluated = evaluate(alone, plain, batches, Compute(torch.device("cpu")), lambda: False)
    assert evaluated is not None and evaluated.loss == pytest.approx(total.item() / count, rel=1e-4)
    for size in (8, 2):
        overrides = (*more, f"local.micro_batch_size={size}")
        step, losses = one_step(build_task(recipe_for(tmp_path, name, model, rows, *overrides)), 8 // size)
        assert (step.samples, step.weight) == (8, count)
        assert losses == [pytest.approx(total.item() / count, rel=1e-4)]
        for made, right in zip(step.of, expected, strict=True):
            torch.testing.assert_close(made, right, rtol=1e-3, atol=1e-5)


def test_a_model_that_reads_the_last_place_finds_the_text_there(tmp_path: Path) -> None:
    rows = [{"text": "ab" * (1 + 9 * n), "label": n} for n in range(2)]
    task: Any = build_task(recipe_for(tmp_path, "sequence_classification", XLNET, rows, "labels=[x, y]"))
    model, samples = task.build_model().eval(), [task.encode(row) for row in rows]
    with torch.no_grad():
        beside = task.outputs(model, task.collate(samples)).logits
        alone = [model(torch.as_tensor(each["input_ids"])[None].long()).logits for each in samples]
    torch.testing.assert_close(beside, torch.cat(alone), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize(
    ("name", "model", "empty", "good"),
    [
        ("token_classification", BERT, {"tokens": [], "tags": []}, {"tokens": ["the", "swarm"], "tags": [0, 1]}),
        ("sequence_classification", BERT, {"text": "", "label": 1}, {"text": "the swarm", "label": 0}),
        ("seq2seq", T5, {"source": "", "target": "the"}, {"source": "the swarm", "target": "swarm"}),
        ("seq2seq", T5, {"source": "the", "target": ""}, {"source": "the swarm", "target": "swarm"}),
    ],
)
def test_rows_of_no_words_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, model: str, empty: Any, good: Any, size: int
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "the": 1, "swarm": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="?")
    fast.save_pretrained(tmp_path / "words")
    overrides = [f"micro_batch_size={size}", "tokenizer=words", *(["labels=[x, y]"] if "class" in name else [])]
    rows = [empty, good, good, good] * 4
    task: Any = build_task(recipe_for(tmp_path, name, model, rows, *overrides))
    stream = task.batches(1)
    samples = [row for _ in range(16 // size) for row in next(stream)["labels"].reshape(size, -1)]
    assert len(samples) == 16 and all((row != -100).any() for row in samples)
    assert re.search(r"of \d+ rows, 1 left out \(rows.jsonl, row (1|5|9|13): nothing to learn", caplog.text)


class Spoiled:
    """Fits y = x·w. The third micro-batch holds no number."""

    def build_model(self, *, outline: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(2, 1)

    def batches(self, seed: int, position: Any = None) -> Any:
        x = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(seed))
        x[2, 0] = torch.nan
        return iter([{"x": each} for each in x])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()


def test_a_micro_batch_without_a_finite_loss_is_dropped_alone(caplog: pytest.LogCaptureFixture) -> None:
    task = Spoiled()
    good = torch.cat([batch["x"] for n, batch in enumerate(task.batches(1)) if n != 2])
    plain = task.build_model()
    loss = task.loss(plain, {"x": good})
    loss.backward()
    step, losses = one_step(task, 4)
    assert step.samples == 9 and losses == [pytest.approx(loss.item())]
    torch.testing.assert_close(step.of, [parameter.grad for parameter in plain.parameters()])
    assert "the loss of a micro-batch of 3 samples is nan; it is dropped" in caplog.text


def test_what_is_written_is_as_long_whatever_stands_beside_it(tmp_path: Path) -> None:
    aside = "evaluation={dataset: {path: aside.jsonl}, every_epochs: 1, evaluator: " + "a" * 52 + "}"
    write_rows(tmp_path / "aside.jsonl", *({**row, "target": "ab " * (1 + 9 * (n % 2))} for n, row in enumerate(PAIRS)))
    task: Any = build_task(recipe_for(tmp_path, "seq2seq", T5, PAIRS, aside))
    model = task.build_model()
    asked: list[int] = []
    model.generate = lambda max_new_tokens, input_ids, **_: (
        asked.append(max_new_tokens) or torch.tensor([[*b"ab "] * (max_new_tokens // 3)] * len(input_ids))
    )
    scores = set()
    for size in (1, 8):
        task = build_task(recipe_for(tmp_path, "seq2seq", T5, PAIRS, aside, f"local.micro_batch_size={size}"))
        found = evaluate(task, model, task.evaluation_batches(), Compute(torch.device("cpu")), lambda: False)
        assert found is not None
        scores.add(found.metrics["rouge_l"])
    assert len(scores) == 1 and set(asked) == {96}


def test_a_model_that_normalizes_over_a_micro_batch_needs_one_size_of_all(tmp_path: Path) -> None:
    fields = "{model_type: resnet, embedding_size: 4, hidden_sizes: [4], depths: [1], layer_type: basic}"
    made = recipe_for(tmp_path, "image_classification", fields, [], "labels=[x, y]", "local.micro_batch_size=8")
    assert build_task(made).build_model(outline=True)
    made = recipe_for(tmp_path, "image_classification", fields, [], "labels=[x, y]", "local.micro_batch_size=2")
    with pytest.raises(RecipeError, match=r"local\.micro_batch_size: this model normalizes over a micro-batch.*, 8;"):
        build_task(made).build_model(outline=True)
