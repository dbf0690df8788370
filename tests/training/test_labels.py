"""Classes: which one a value of the data means, in which row of a saved head it is, and what others read of that."""

from __future__ import annotations

import json
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import ClassLabel, Dataset, Features, List, Value
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from swarmcli.cli.validate import validate
from swarmcli.errors import DataError, RecipeError
from swarmcli.recipe import Recipe, load_recipe
from swarmcli.training import build_task
from swarmcli.training.chat import IGNORED, BadRow
from swarmcli.training.look import look_at_rows
from swarmcli.training.model_card import describe_model

SIZES = "hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16"
BERT = f"{{model_type: bert, {SIZES}, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}}"
VIT = f"{{model_type: vit, {SIZES}, image_size: 8, patch_size: 4}}"
ANIMALS = ("dog", "cat")
TEXTS, TAGS, IMAGES = "sequence_classification", "token_classification", "image_classification"


def recipe_for(directory: Path, labels: str, *overrides: str, task: str = TEXTS, model: str = BERT) -> Recipe:
    images = task == IMAGES
    data = "{path: imagefolder, data_files: ['img/**']}" if images else "{path: rows.parquet}"
    text = f"""\
run_id: small
task: {task}
base_model: {model}
labels: {labels}
datasets: [{data}]
target_batch_size: 8
micro_batch_size: 4
local: {{device: cpu}}
"""
    text += "" if images else "sequence_len: 32\ntokenizer: bytes\n"
    (directory / "small.yaml").write_text(text)
    return load_recipe(directory / "small.yaml", overrides)


def give(file: Path, kind: Any, *rows: tuple[Any, Any], names: tuple[str, str] = ("text", "label")) -> None:
    """A Parquet file of texts and labels, or of words and tags."""
    of_texts = List(Value("string")) if isinstance(rows[0][0], list) else Value("string")
    features = Features(dict(zip(names, (of_texts, kind), strict=True)))
    Dataset.from_list([dict(zip(names, row, strict=True)) for row in rows], features).to_parquet(str(file))


def give_animals(directory: Path, count: int = 6) -> None:
    """Directories of dark dogs and of bright cats."""
    for name, level in (("dog", 20), ("cat", 220)):
        (directory / "img" / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (level + number,) * 3).save(directory / "img" / name / f"{number}.png")


def learned(recipe: Recipe, count: int = 4, *, held_out: bool = False) -> set[tuple[str, str]]:
    """The texts, as the model reads them, with the names of what it learns of each."""
    task: Any = build_task(recipe)
    batches = task.evaluation_batches() if held_out else islice(task.batches(1), count)
    return {
        (bytes(each for each in ids.tolist() if each < 256).decode(), task.names[label])
        for batch in batches
        for ids, label in zip(batch["input_ids"], batch["labels"].tolist(), strict=True)
    }


@pytest.mark.parametrize(
    ("labels", "meant", "nothing"),
    [
        ("[1, 2, 3, 4, 5]", [(1, "1"), (5, "5"), ("4", "4"), (2.0, "2"), ("3.0", "3")], [0, 6, 1.5, "0"]),
        ("[7, 8]", [(7, "7")], ["0" * 100_000 + "x"]),
        ("['01', '02', '10']", [(1, "01"), ("02", "02"), (10, "10")], [0]),
        ("[-1, 0, 1]", [(-1, "-1"), (0, "0"), (1.0, "1"), ("-1.0", "-1")], [2]),
        ("[0.5, 1]", [(0.5, "0.5"), (1.0, "1"), (Decimal("1.00"), "1")], [0]),
        ("[0.5, 1.5]", [(0.5, "0.5"), ("1.5", "1.5")], [0, 1]),
        ("[0, 1, other]", [(0, "0"), (1, "1"), ("other", "other")], [2]),
        ("[neg, pos]", [(0, "neg"), ("1", "pos"), (0.0, "neg"), ("pos", "pos")], [0.5, -1, 2, "Pos", ["pos"], None]),
        ("[neg, pos]", [(True, "pos"), (False, "neg"), ("true", "pos"), ("FALSE", "neg")], ["no", float("nan")]),
        ("[true, false]", [(True, "true"), (False, "false"), ("True", "true")], [0, 1]),
        ("[yes, no]", [(True, "yes"), (False, "no"), ("false", "no")], [0, 1]),
        ("[maybe, no, yes]", [(True, "yes"), (False, "no"), (0, "maybe"), (2, "yes")], []),
        ("[true, unknown]", [(True, "true"), (1, "unknown")], [False]),
    ],
)
def test_a_label_is_its_name_or_the_number_that_names_are_and_else_a_place(
    tmp_path: Path, labels: str, meant: list[tuple[Any, str]], nothing: list[Any]
) -> None:
    task: Any = build_task(recipe_for(tmp_path, labels))
    assert [task.recipe.labels[task.number_of(label)] for label, _ in meant] == [name for _, name in meant]
    for label in nothing:
        with pytest.raises(BadRow, match="is none of labels: "):
            task.number_of(label)


def test_names_of_a_dataset_are_names_whatever_its_own_order_is(tmp_path: Path) -> None:
    """A file that trains, another one in a mixture with it, and one to evaluate on number their classes unlike."""
    rows = [(f"a {name}", name) for name in ANIMALS * 4]
    give(tmp_path / "rows.parquet", ClassLabel(names=["dog", "cat"]), *rows, ("who", -1))
    give(tmp_path / "more.parquet", ClassLabel(names=["cat", "dog"]), *rows)
    both = "datasets=[{path: rows.parquet, streaming: false}, {path: more.parquet}]"
    aside = "evaluation={dataset: {path: more.parquet}, every_epochs: 1, samples: 8}"
    right = {("a dog", "dog"), ("a cat", "cat")}
    for labels in ("[cat, dog]", "[dog, cat]"):
        alone, mixed = recipe_for(tmp_path, labels, aside), recipe_for(tmp_path, labels, both)
        assert learned(alone) == learned(mixed, 8) == learned(alone, held_out=True) == right
    (look, other) = look_at_rows(build_task(alone))
    assert look.classes == (("dog", 0, 4), ("cat", 1, 4)) and other.rows == 8
    assert look.counts == (
        "1 left out (rows.parquet, row 9: the label -1 is none of labels: dog, cat; numbers are 0 to 1; add it to "
        "labels, or name another column by `columns`)"
    )
    with pytest.raises(DataError, match="'dog' is none of labels: hund, katze; add the name that the data give"):
        learned(recipe_for(tmp_path, "[hund, katze]"))


@pytest.mark.parametrize(
    ("names", "labels", "right"),
    [
        (["1", "2", "10"], "[1, 2, 10]", {("0", "1"), ("1", "2"), ("2", "10")}),
        (["0", "1", "2"], "[bad, fair, good]", {("0", "bad"), ("1", "fair"), ("2", "good")}),
        (["1", "2", "3"], "[bad, fair, good]", "the label '[123]' is none of labels: bad, fair, good; add the"),
    ],
)
def test_numbers_that_are_names_of_a_dataset_are_no_places(
    tmp_path: Path, names: list[str], labels: str, right: set[tuple[str, str]] | str
) -> None:
    give(tmp_path / "rows.parquet", ClassLabel(names=names), *((str(n), n) for n in range(3)))
    recipe = recipe_for(tmp_path, labels)
    if not isinstance(right, str):
        assert learned(recipe) == right
        return
    with pytest.raises(DataError, match=right):
        learned(recipe)


def test_tags_of_words_are_by_their_names_and_a_word_may_have_none(tmp_path: Path) -> None:
    tags = ["O", "B-PER", "B-LOC"]
    row = (["Ada", "in", "Rome", "Oh"], [1, 0, 2, IGNORED])
    give(tmp_path / "rows.parquet", List(ClassLabel(names=tags)), row, names=("tokens", "tags"))
    recipe = recipe_for(tmp_path, "[B-LOC, B-PER, O]", "micro_batch_size=1", task=TAGS)
    (labels,) = next(build_task(recipe).batches(1))["labels"]
    assert [recipe.labels[label] for label in labels.tolist() if label != IGNORED] == ["B-PER", "O", "B-LOC"]


def test_directories_of_images_are_classes_and_a_pipeline_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    give_animals(tmp_path)
    recipe = recipe_for(tmp_path, "[dog, cat, cow]", task=IMAGES, model=VIT)
    task: Any = build_task(recipe)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for batch in islice(task.batches(1), 12):
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "saved")
    describe_model(tmp_path / "saved", recipe, task, 1, 48, trainers=1)
    use: Any = pipeline("image-classification", model=str(tmp_path / "saved"))
    for name in ANIMALS:
        assert use(Image.open(tmp_path / "img" / name / "0.png"))[0]["label"] == name
    capsys.readouterr()
    validate(str(tmp_path / "small.yaml"), [], False, False)
    told = capsys.readouterr().out
    assert "12 rows looked at; name → number → how often:\n  dog → 0 → 6\n  cat → 1 → 6\n  cow → 2 → none\n" in told


SAVED = ("POS", "neutral", "neg")  # in the order of the rows


def save_classifier(place: Path, task: str, **fields: Any) -> Any:
    """A classifier of three classes, as others save one."""
    auto: Any = {
        TEXTS: AutoModelForSequenceClassification,
        TAGS: AutoModelForTokenClassification,
        IMAGES: AutoModelForImageClassification,
    }[task]
    sizes = yaml.safe_load(VIT) if task == IMAGES else {**yaml.safe_load(BERT), "vocab_size": 259}
    model = auto.from_config(AutoConfig.for_model(**sizes, id2label=dict(enumerate(SAVED)), **fields))
    torch.nn.init.normal_(model.classifier.bias)
    model.save_pretrained(place)
    if task == IMAGES:
        ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(place)
    return model.eval()


@pytest.mark.parametrize(
    ("task", "adapts"),
    [(TEXTS, ""), (TAGS, ""), (IMAGES, ""), (TEXTS, "all-linear"), (TAGS, "[query]"), (IMAGES, "[q_proj]")],
)
def test_each_class_of_a_saved_model_keeps_its_row_whatever_the_order_of_labels(
    tmp_path: Path, task: str, adapts: str
) -> None:
    saved = save_classifier(tmp_path / "saved", task)
    names = ["neg", "pos", "neutral"]
    lora = ["adapter=lora", f"lora_target_modules={adapts}", "local.base_dtype=float32"] if adapts else []
    made: Any = build_task(recipe_for(tmp_path, "[neg, pos, neutral]", *lora, task=task, model="saved"))
    model = made.build_model().eval()
    rows: list[dict[str, Any]] = [{"text": name, "label": name} for name in names]
    if task == TAGS:
        rows = [{"tokens": names, "tags": names}]
    elif task == IMAGES:
        rows = [{"image": Image.new("RGB", (8, 8), (80 * n,) * 3), "label": name} for n, name in enumerate(names)]
    batch = made.collate([made.encode(row) for row in rows])
    logits = saved(**{name: each for name, each in batch.items() if name != "labels"}).logits
    rows_of = {name.lower(): number for number, name in saved.config.id2label.items()}
    if task == TAGS:
        logits = logits[batch["labels"] != IGNORED]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([rows_of[name] for name in names]))
    torch.testing.assert_close(made.loss(model, batch), expected)
    answers = made.outputs(model, batch).logits
    answers = answers[batch["labels"] != IGNORED] if task == TAGS else answers
    for number, name in model.config.id2label.items():
        torch.testing.assert_close(answers[:, number], logits[:, rows_of[name]])


def test_a_head_that_says_something_else_is_refused_or_made_anew(tmp_path: Path) -> None:
    save_classifier(tmp_path / "saved", TEXTS)
    save_classifier(tmp_path / "several", TEXTS, problem_type="multi_label_classification")
    for model, labels, words in [
        (
            "saved",
            "[neg, pos, mixed]",
            r"its id2label is .*'POS'.*, and each row has one of labels, neg, pos, mixed; take",
        ),
        (
            "several",
            "[neg, pos, neutral]",
            "small.yaml:3: base_model: its problem_type is 'multi_label_classification'",
        ),
        ("several", "[neg, pos]", "take its names or another model, or remove problem_type from its config.json"),
        (BERT[:-1] + ", problem_type: regression}", "[neg, pos]", "base_model: problem_type follows from labels"),
    ]:
        with pytest.raises(RecipeError, match=words):
            build_task(recipe_for(tmp_path, labels, model=model)).build_model(outline=True)
    fewer = build_task(recipe_for(tmp_path, "[pos, neg]", model="saved")).build_model()
    assert fewer.config.id2label == {0: "pos", 1: "neg"} and fewer.classifier.bias.tolist() == [0, 0]
    unnamed = json.loads((tmp_path / "saved" / "config.json").read_text())
    unnamed["id2label"] = {str(number): f"LABEL_{number}" for number in range(3)}
    (tmp_path / "saved" / "config.json").write_text(json.dumps(unnamed))
    kept = build_task(recipe_for(tmp_path, "[a, b, c]", model="saved")).build_model()
    assert kept.config.id2label == {0: "a", 1: "b", 2: "c"} and kept.classifier.bias.all()
