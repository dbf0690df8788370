"""Tasks beside causal_lm: what they read, learn and measure."""

from __future__ import annotations

import json
import math
import random
import re
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmcli.errors import DataError, RecipeError
from swarmcli.recipe import Recipe, parse_recipe
from swarmcli.training import Compute, build_task, evaluate
from swarmcli.training.chat import IGNORED, BadRow

from .small_tasks import image_rows, png, write_rows

BERT = (
    "{model_type: bert, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, "
    "hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}"
)
GPT2 = "{model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}"
T5 = "{model_type: t5, d_model: 32, d_kv: 16, d_ff: 32, num_layers: 1, num_heads: 2, dropout_rate: 0.0}"
VIT = (
    "{model_type: vit, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, "
    "image_size: 16, patch_size: 8}"
)
CPU = Compute(torch.device("cpu"))


def recipe_for(task: str, model: str, directory: Path, *overrides: str) -> Recipe:
    """A recipe that reads rows.jsonl and evaluates on aside.jsonl."""
    text = f"""\
run_id: small
task: {task}
base_model: {model}
datasets: [{{path: rows.jsonl}}]
evaluation: {{dataset: {{path: aside.jsonl}}, every_epochs: 1, samples: 12}}
sequence_len: 24
target_batch_size: 8
micro_batch_size: 8
local: {{device: cpu, shuffle_buffer_size: 8}}
"""
    if task == "image_classification":
        text = text.replace("sequence_len: 24\n", "").replace("path: rows.jsonl", "path: rows.parquet")
        text = text.replace("path: aside.jsonl", "path: aside.parquet")
    return parse_recipe(text, overrides, name="small.yaml", directory=directory)


def give(directory: Path, rows: Sequence[dict[str, Any]], aside: Sequence[dict[str, Any]] = ()) -> None:
    write_rows(directory / "rows.jsonl", *rows)
    write_rows(directory / "aside.jsonl", *(aside or rows))


def give_images(directory: Path) -> None:
    """Dark ones and bright ones in turn."""
    rng = random.Random(0)
    for name in ("rows", "aside"):
        levels = [(rng.randrange(100) + 150 * (n % 2), n % 2) for n in range(32)]
        rows = [(png(20, 30, (level,) * 3), label) for level, label in levels]
        image_rows(directory / f"{name}.parquet", *rows)


def trained(recipe: Recipe, steps: int = 25, rate: float = 5e-3) -> tuple[Any, Any, list[float]]:
    """Task, model, and the losses of so many steps on micro-batches."""
    task = build_task(recipe)
    model, losses = task.build_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    for batch in islice(task.batches(1), steps):
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return task, model, losses


def falls(losses: Sequence[float]) -> bool:
    return sum(losses[-5:]) < 0.8 * sum(losses[:5])


def goes_on(recipe: Recipe) -> bool:
    """Whether a stream that goes on gives what the first one would have given."""
    task = build_task(recipe)
    stream = task.batches(7)
    list(islice(stream, 3))
    again = task.batches(7, json.loads(json.dumps(stream.position())))
    pairs = list(zip(islice(stream, 4), islice(again, 4), strict=True))
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)


def measured(task: Any, model: Any) -> Any:
    return evaluate(task, model, task.evaluation_batches(), CPU, lambda: False)


def kinds(count: int = 20) -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [{"text": rng.choice(word) * 9, "label": label} for label, word in (("neg", "ab"), ("pos", "yz"))] * count


def test_masked_lm_learns_and_its_gaps_come_again(tmp_path: Path) -> None:
    give(tmp_path, [{"text": "abcdefgh" * 20}] * 9)
    recipe = recipe_for("masked_lm", BERT, tmp_path)
    task, model, losses = trained(recipe, 40)
    assert falls(losses) and goes_on(recipe)
    batches, again = task.evaluation_batches(), build_task(recipe).evaluation_batches()
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(batches, again, strict=True))
    found = measured(task, model)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(found.loss), rel=0.05)


def test_seq2seq_learns_and_where_one_evaluates_alone_what_it_writes_is_compared(tmp_path: Path) -> None:
    give(tmp_path, [{"source": a * 3, "target": f"{a} {a}"} for a in "abcd"] * 5)
    recipe = recipe_for("seq2seq", T5, tmp_path)
    task, model, losses = trained(recipe, 60, 2e-2)
    assert falls(losses) and goes_on(recipe)
    found = measured(task, model)
    assert set(found.metrics) == {"perplexity", "accuracy"}
    assert found.metrics["perplexity"] == pytest.approx(math.exp(found.loss), rel=0.05)
    alone = build_task(recipe_for("seq2seq", T5, tmp_path, f"evaluation.evaluator={'a' * 52}"))
    assert (
        measured(alone, model).metrics["rouge_l"] > 0.6 > 0.3 > measured(alone, task.build_model()).metrics["rouge_l"]
    )


def test_gaps_are_berts_and_others_in_each_pass(tmp_path: Path) -> None:
    give(tmp_path, [{"text": "abcdefgh" * 500}] * 9)
    recipe = recipe_for("masked_lm", BERT, tmp_path, "sequence_len=500", "micro_batch_size=8")
    batch = next(build_task(recipe).batches(1))
    gaps = batch["labels"] != IGNORED
    assert set(gaps.sum(1).tolist()) <= {74, 75}, "15% of each sample, without what marks its texts"
    seen, right = batch["input_ids"][gaps], batch["labels"][gaps]
    masked, kept = (seen == 255).float().mean(), (seen == right).float().mean()
    assert 0.74 < masked < 0.86 and 0.06 < kept < 0.14
    assert not ((batch["input_ids"] == 255) & ~gaps).any()
    give(tmp_path, [{"text": "abcdefgh" * 3}])
    stream = build_task(recipe_for("masked_lm", BERT, tmp_path, "micro_batch_size=1", "sequence_len=7")).batches(1)
    assert len({tuple((batch["labels"] != IGNORED).flatten().tolist()) for batch in islice(stream, 60)}) > 2


def test_sequence_classification_learns_and_its_metrics_are_those_of_a_hand_count(tmp_path: Path) -> None:
    give(tmp_path, kinds(), kinds(6))
    recipe = recipe_for("sequence_classification", BERT, tmp_path, "labels=[neg, pos]")
    task, model, losses = trained(recipe)
    assert falls(losses) and goes_on(recipe) and model.config.id2label == {0: "neg", 1: "pos"}
    untrained = task.build_model().eval()
    batches = task.evaluation_batches()
    found = measured(task, untrained)
    said = torch.cat([task.outputs(untrained, batch).logits.argmax(-1) for batch in batches])
    right = torch.cat([batch["labels"] for batch in batches])
    each = [2 * ((said == n) & (right == n)).sum() / max(1, ((said == n).sum() + (right == n).sum())) for n in range(2)]
    assert found.samples == 12
    assert found.metrics["accuracy"] == pytest.approx((said == right).float().mean().item())
    assert found.metrics["f1"] == pytest.approx(float(sum(each)) / 2)
    assert measured(task, model).metrics == {"accuracy": 1.0, "f1": 1.0}


@pytest.mark.parametrize(
    ("task", "model", "row"),
    [
        ("causal_lm", GPT2, {"text": "ab ab"}),
        ("seq2seq", T5, {"source": "abc", "target": "cb"}),
        ("token_classification", BERT, {"tokens": ["ab", "c"], "tags": [1, 0]}),
    ],
)
def test_smoothed_labels_are_those_of_torch_in_training_alone(
    tmp_path: Path, task: str, model: str, row: dict[str, Any]
) -> None:
    """Rows are of two lengths, so that some labels are left out."""
    longer = {name: value * 2 if name != "label" else value for name, value in row.items()}
    give(tmp_path, [row, longer] * 8)
    labels = ["labels=[x, y]"] if "classification" in task else []
    type_of = ["datasets=[{path: rows.jsonl, type: completion}]"] if task == "causal_lm" else []
    recipe = recipe_for(task, model, tmp_path, "label_smoothing_factor=0.1", *labels, *type_of)
    made: Any = build_task(recipe)
    net, batch = made.build_model(), next(made.batches(1))
    logits, right = made.answers(made.outputs(net, batch).logits, batch)
    for smoothing, told in ((0.1, made.loss(net, batch)), (0.0, made.measure(net, batch, {}))):
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, -2), right.flatten().long(), ignore_index=IGNORED, label_smoothing=smoothing
        )
        torch.testing.assert_close(told, expected)
    assert made.weight(batch) == (right != IGNORED).sum() < right.numel()


def test_pairs_are_told_apart_and_cut_to_the_length_for_encoders_of_any_kind(tmp_path: Path) -> None:
    give(tmp_path, [{"text": "a" * 99, "text_pair": "b" * 99, "label": n % 2} for n in range(8)])
    batch = next(build_task(recipe_for("sequence_classification", BERT, tmp_path, "labels=[no, yes]")).batches(1))
    assert batch["input_ids"][0].tolist() == [257, *[97] * 11, 256, *[98] * 10, 256]
    for model_type, size in (("roberta", "hidden_size"), ("distilbert", "dim")):
        fields = f"{{model_type: {model_type}, {size}: 32, num_hidden_layers: 1, num_attention_heads: 2}}"
        task = build_task(recipe_for("sequence_classification", fields, tmp_path, "labels=[no, yes]"))
        assert task.loss(task.build_model(), next(task.batches(1))).isfinite()


def test_whoever_loads_a_checkpoint_has_the_tokens_of_the_training(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    task: Any = build_task(recipe_for("sequence_classification", BERT, tmp_path, "labels=[no, yes]"))
    (tmp_path / "saved").mkdir()
    task.save_preprocessing(tmp_path / "saved")
    saved: Any = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    again: Any = build_task(
        recipe_for("sequence_classification", BERT, tmp_path, "labels=[no, yes]", "tokenizer=saved")
    )
    for row in ({"text": "né"}, {"text": "one", "text_pair": "two"}, {"text": "", "text_pair": "x" * 99}):
        ids = task.encode({**row, "label": 0})["input_ids"].tolist()
        assert again.encode({**row, "label": 0})["input_ids"].tolist() == ids
        if len(ids) < 24:
            assert saved(*row.values())["input_ids"] == ids


def test_token_classification_learns_labels_of_words(tmp_path: Path) -> None:
    rng = random.Random(0)
    words = [[rng.choice(["aa", "zz"]) for _ in range(rng.randrange(2, 6))] for _ in range(60)]
    give(tmp_path, [{"words": each, "tags": ["B" if w == "aa" else "O" for w in each]} for each in words])
    overrides = [f"{key}.columns={{tokens: words}}" for key in ("datasets.0", "evaluation.dataset")]
    recipe = recipe_for("token_classification", BERT, tmp_path, "labels=[O, B]", *overrides)
    task, model, losses = trained(recipe, 40, 1e-2)
    assert falls(losses) and goes_on(recipe)
    row = task.encode({"tokens": ["aa", "zz"], "tags": ["B", 0]})
    assert row["labels"].tolist() == [IGNORED, 1, IGNORED, 0, IGNORED, IGNORED, IGNORED]
    assert measured(task, model).metrics["accuracy"] > 0.9


def test_image_classification_learns(tmp_path: Path) -> None:
    give_images(tmp_path)
    recipe = recipe_for("image_classification", VIT, tmp_path, "labels=[dark, bright]")
    task, model, losses = trained(recipe)
    assert falls(losses) and goes_on(recipe)
    batch = next(task.batches(1))
    assert batch["pixel_values"].shape == (8, 3, 16, 16) and batch["pixel_values"].dtype is torch.float32
    assert batch["pixel_values"].min() >= -1 and batch["pixel_values"].max() <= 1
    assert measured(task, model).metrics["accuracy"] == 1.0
    (tmp_path / "saved").mkdir()
    model.save_pretrained(tmp_path / "saved")
    task.save_preprocessing(tmp_path / "saved")
    again: Any = build_task(recipe_for("image_classification", "saved", tmp_path, "labels=[dark, bright]"))
    assert torch.equal(next(again.batches(1))["pixel_values"], batch["pixel_values"])


def test_images_are_decoded_side_by_side_and_come_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_images(tmp_path)
    recipe = recipe_for("image_classification", VIT, tmp_path, "labels=[dark, bright]", "micro_batch_size=4")
    alone = list(islice(build_task(recipe).batches(1), 12))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    task: Any = build_task(recipe)
    encode, met, first = task.encode, threading.Barrier(4), iter(range(4))

    def together(row: Any) -> Any:
        if next(first, None) is not None:
            met.wait(60)  # breaks unless the first four rows are encoded at a time
        return encode(row)

    monkeypatch.setattr(task, "encode", together)
    stream = task.batches(1)
    batches = list(islice(stream, 6))
    batches += islice(task.batches(1, json.loads(json.dumps(stream.position()))), 6)  # another process goes on
    assert all(
        torch.equal(batch[name], other[name]) for batch, other in zip(alone, batches, strict=True) for name in batch
    )


def test_a_model_that_reads_colours_in_another_order_gets_them_so(tmp_path: Path) -> None:
    from PIL import Image
    from transformers.models.mobilevit.image_processing_pil_mobilevit import MobileViTImageProcessorPil

    task: Any = build_task(recipe_for("image_classification", VIT, tmp_path, "labels=[dark, bright]"))
    task.processor = MobileViTImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    batch = task.collate([task.encode({"image": Image.new("RGB", (8, 8), (255, 0, 0)), "label": 0})])
    assert batch["pixel_values"][0, :, 0, 0].tolist() == [0, 0, 1], "blue first"


def test_a_head_for_other_labels_is_made_anew_for_a_saved_model(tmp_path: Path) -> None:
    give(tmp_path, kinds())
    task = build_task(recipe_for("sequence_classification", BERT, tmp_path, "labels=[neg, pos]"))
    saved: Any = task.build_model()
    saved.save_pretrained(tmp_path / "saved")
    recipe = recipe_for("sequence_classification", "saved", tmp_path, "labels=[neg, pos, other]")
    first, second = (dict(build_task(recipe).build_model().state_dict()) for _ in range(2))
    assert first["classifier.weight"].shape == (3, 32)
    assert all(torch.equal(first[name], second[name]) for name in first), "peers get equal weights"
    assert all(torch.equal(first[n], t) for n, t in saved.state_dict().items() if not n.startswith("classifier"))


@pytest.mark.parametrize(
    ("task", "good", "bad", "words"),
    [
        ("sequence_classification", {"text": "a", "label": "neg"}, {"label": "poss"}, "'poss' is none of labels: neg"),
        ("token_classification", {"tokens": ["a"], "tags": ["pos"]}, {"tags": ["bad"]}, "the label 'bad' is none of"),
        ("token_classification", {"tokens": ["a"], "tags": ["pos"]}, {"tags": []}, "with one label for each of 1"),
    ],
)
def test_a_bad_row_is_left_out_counted_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, task: str, good: dict[str, Any], bad: dict[str, Any], words: str
) -> None:
    give(tmp_path, [good, good | bad, good, good])
    made = build_task(recipe_for(task, BERT, tmp_path, "labels=[neg, pos]", "micro_batch_size=3"))
    assert len(list(islice(made.batches(1), 3))) == 3
    assert re.search(r"datasets.0 \(rows.jsonl\): of \d rows, 1 left out \(rows.jsonl, row 2: ", caplog.text)
    assert words in caplog.text
    assert [len(batch["labels"]) for batch in made.evaluation_batches()] == [3]
    assert re.search(r"evaluation.dataset \(aside.jsonl\): of \d rows, 1 left out \(aside.jsonl, row 2", caplog.text)


def test_an_image_that_cannot_be_decoded_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import io

    from PIL import Image

    noise = io.BytesIO()
    Image.effect_noise((40, 40), 90).save(noise, "PNG")
    whole = noise.getvalue()
    for name in ("rows", "aside"):
        image_rows(tmp_path / f"{name}.parquet", *((each, 0) for each in (whole, whole[:400], b"GIF9", b"", whole)))
    recipe = recipe_for("image_classification", VIT, tmp_path, "labels=[dark, bright]", "micro_batch_size=2")
    made: Any = build_task(recipe)
    assert [len(batch["labels"]) for batch in islice(made.batches(1), 3)] == [2] * 3
    assert re.search(r"datasets.0 \(rows.parquet\): of \d rows, 1 left out \(rows.parquet, row [234]: ", caplog.text)
    with pytest.raises(BadRow, match="truncated"):
        made.encode({"image": Image.open(io.BytesIO(whole[:400])), "label": 0})


@pytest.mark.parametrize(
    ("overrides", "row", "message"),
    [
        ([], {"body": "a", "label": 0}, r"no column 'text' for text; it has body, label: name one .* by `field: …`"),
        (["datasets.0.field=body"], {"text": "a", "label": 0}, r"no column 'body' for text; it has label, text"),
        ([], {"text": "a", "label": "poss"}, r"none of the first 1,000 rows .*'poss' is none of labels: .*mean pos"),
        ([], {"text": "a", "label": 2}, r"the label 2 is none of labels: neg, pos; numbers are 0 to 1; add it"),
        ([], {"text": 5, "label": 0}, r"text is 5, and should be text"),
        ([], {"text": "a", "label": None}, r"no row of the data teaches anything"),
    ],
)
def test_rows_that_do_not_fit_are_told(tmp_path: Path, overrides: list[str], row: dict[str, Any], message: str) -> None:
    give(tmp_path, [row] * (1100 if "1,000" in message else 3))
    recipe = recipe_for("sequence_classification", BERT, tmp_path, "labels=[neg, pos]", *overrides)
    with pytest.raises(DataError, match=message):
        next(build_task(recipe).batches(1))


@pytest.mark.parametrize(
    ("task", "overrides", "message"),
    [
        ("sequence_classification", ["labels=[a, b]", "datasets.0={source: stdlib}"], "stdlib gives texts, and sequ"),
        ("sequence_classification", ["labels=[a, b]", "datasets.0.columns={lable: x}"], "did you mean label"),
        ("sequence_classification", ["labels=[a, b]", "datasets.0.columns={text: x}"], "write `field: …` instead"),
        ("masked_lm", ["datasets.0.columns={label: x}"], "masked_lm reads no column called label; remove it"),
        ("seq2seq", ["datasets.0.field=x"], r"datasets\.0\.field: seq2seq reads no single text; use `columns`"),
        ("sequence_classification", ["labels=[a, b]", "base_model.id2label={0: a}"], "id2label follows from labels"),
        ("sequence_classification", [], "small.yaml:1: labels: .* needs the names of two classes or more"),
        ("sequence_classification", ["labels=[a, a]"], "labels: one of them is there twice"),
        ("masked_lm", ["labels=[a, b]"], "labels has no meaning beside task: masked_lm; remove it, or take task: seq"),
        ("image_classification", ["labels=[a, b]", "sequence_len=8"], "sequence_len has no meaning beside task: im"),
        ("image_classification", ["task=seq2seq"], "sequence_len is missing; add `sequence_len: …`"),
        ("masked_lm", ["base_model={model_type: t5}"], "trains masked language models; t5 is none; take one of albert"),
    ],
)
def test_recipes_that_do_not_fit_their_task_are_refused(
    tmp_path: Path, task: str, overrides: list[str], message: str
) -> None:
    give(tmp_path, kinds())
    with pytest.raises(RecipeError, match=message):
        build_task(recipe_for(task, T5 if task == "seq2seq" else BERT, tmp_path, *overrides)).build_model()
