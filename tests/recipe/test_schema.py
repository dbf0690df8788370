"""Values of a recipe: what they become, and what is said of those that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from swarmcli.recipe import FilesDataset, HuggingFaceDataset, Recipe, parse_recipe
from swarmcli.recipe.problems import all_keys

from .recipes import SMALL, refused, small


def test_a_volunteer_overrides_what_concerns_the_machine() -> None:
    recipe = small("micro_batch_size=4", "gradient_accumulation_steps=2")
    assert (recipe.micro_batch, recipe.accumulation_steps) == (4, 2)
    recipe = small("micro_batch_size=4", "local.micro_batch_size=1", "local.gradient_accumulation_steps=3")
    assert (recipe.micro_batch, recipe.accumulation_steps) == (1, 3)


def test_relative_paths_begin_beside_the_recipe_and_data_may_lie_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    recipe = small("output_dir=out", "local.identity_path=~/id.key", "local.data_dir=mine", directory=tmp_path)
    assert (recipe.directory, recipe.output_dir) == (tmp_path, tmp_path / "out")
    assert recipe.local.identity_path == Path("/somewhere/id.key")
    assert recipe.locate("x/../y") == tmp_path / "y" and recipe.locate("/abs") == Path("/abs")
    assert recipe.locate("texts", data=True) == tmp_path / "mine" / "texts"
    usual = small(directory=tmp_path)
    assert (usual.output_dir, usual.locate("texts", data=True)) == (tmp_path / "runs", tmp_path / "texts")


def test_values_know_where_they_were_written() -> None:
    recipe = small("local.port=7")
    assert recipe.origin("base_model", "n_head") == "small.yaml:5"
    assert recipe.origin("base_model", "absent") == "small.yaml:2"
    assert recipe.origin("local", "port") == "--set local.port=7"
    assert recipe.origin("optimizer", "name") == "small.yaml:1"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.learning_rate=0", "should be above 0"),
        ("optimizer.learning_rate=.inf", "should be a finite number"),
        ("optimizer.learning_rate=fast", "should be a number, not 'fast'; learning_rate: the peak of the schedule"),
        ("optimizer.betas=0.9", "should be a list like [a, b]"),
        ("optimizer.name=AdamW8bit", "AdamW8bit keeps statistics in fewer bits, and a newcomer gets them in float32"),
        ("optimizer.name=adamx", "optimizer.name should be one of 'adamw', 'adam', 'sgd', 'muon', "),
        ("run_id=a b", "run_id should be of another form, not 'a b'; run_id: the run's name: up to 64 letters"),
        ("run_id=null", "run_id should be text, not empty"),
        ("seed=-1", "seed should be at least 0, not -1"),
        ("datasets=stdlib", "datasets should be a list"),
        ("datasets.0.source=stdlibb", "datasets.0 needs a source that is known; write `source:` with one of files,"),
        ("datasets.0={source: files}", "datasets.0.path is missing; add `path: …` (a file or a directory"),
        ("network.initial_peers=[foo]", "network.initial_peers.0: 'foo' is no address: expected tcp://host:port"),
        ("local.device=gpu", "local.device should be of another form, not 'gpu'; device: cpu"),
        ("base_model=[1]", "write a transformers config below it"),
        ("base_model={n_layer: 2}", "base_model lacks model_type; add for example `model_type: gpt2`"),
    ],
)
def test_values_out_of_bounds_are_refused_with_what_would_do(override: str, words: str) -> None:
    message = refused(SMALL, override)
    assert words in message and message.startswith((f"--set {override}", "small.yaml:8: datasets.0"))


def test_a_step_larger_than_an_epoch_is_refused() -> None:
    for overrides in (["micro_batch_size=9"], ["micro_batch_size=4", "gradient_accumulation_steps=3"]):
        assert "is larger than an epoch of the whole swarm" in refused(SMALL, "target_batch_size=8", *overrides)
    assert small("target_batch_size=8", "micro_batch_size=4", "gradient_accumulation_steps=2").target_batch_size == 8
    here = refused(SMALL, "target_batch_size=8", "micro_batch_size=8", "local.micro_batch_size=16")
    assert here.startswith("--set local.micro_batch_size=16")


def test_a_recipe_can_be_made_in_code_and_is_frozen() -> None:
    values = {"base_model": {"model_type": "gpt2"}, "datasets": ({"source": "stdlib"},), "sequence_len": 8}
    recipe = Recipe.model_validate({"run_id": "x", "target_batch_size": 8, **values})
    assert recipe.origin("seed") == "recipe" and recipe.directory == Path.cwd()
    with pytest.raises(ValidationError):
        recipe.seed = 3  # type: ignore[misc]


def test_text_that_looks_like_something_else_stays_text() -> None:
    text = SMALL.replace("run_id: small", "run_id: 0012") + "local:\n  name: no\n"
    recipe = parse_recipe(text)
    assert recipe.run_id == "0012" and recipe.local.name == "no"


@pytest.mark.parametrize(
    ("item", "source"),
    [
        ("{path: texts}", "files"),
        ("{path: owner/name}", "huggingface"),
        ("{path: json, data_files: [a.txt]}", "huggingface"),
        ("{path: json}", "files"),
        ("{path: owner/name, source: files}", "files"),
    ],
)
def test_a_path_says_where_rows_come_from_unless_somebody_does(item: str, source: str) -> None:
    assert small(f"datasets.0={item}").datasets[0].source == source
    (dataset,) = small("datasets.0={path: ./chats/a.jsonl, field: said}").datasets
    assert isinstance(dataset, HuggingFaceDataset)  # a file of rows is read by its rows
    assert (dataset.path, dataset.data_files, dataset.field) == ("json", ("./chats/a.jsonl",), "said")


def test_words_of_the_first_versions_are_refused_with_those_to_write() -> None:
    said = refused(SMALL, "datasets.0={type: huggingface, path: json, data_files: [a.jsonl], text_column: said}")
    assert "datasets.0={" in said and said.endswith(": type says what a row is; write `source: huggingface`")
    said = refused(f"{SMALL}evaluation:\n  every_epochs: 3\n  dataset:\n    type: stdlib\n")
    assert said == "small.yaml:14: type says what a row is; write `source: stdlib`"
    assert "text_column; it is called field; rename" in refused(SMALL, "datasets.0={path: a.jsonl, text_column: said}")


def test_values_are_typed_like_the_file_and_the_last_of_several_wins() -> None:
    typed = ("optimizer.learning_rate=1e-2", "optimizer.betas=[0.8, 0.9]", "run_id=2024", "local.client_mode=yes")
    recipe = small(*typed, "max_epochs=null", "base_model.n_layer=3", "local.name=a=b", "seed=1", "seed=2")
    assert (recipe.optimizer.learning_rate, recipe.optimizer.betas) == (0.01, (0.8, 0.9))
    assert (recipe.run_id, recipe.max_epochs, recipe.seed) == ("2024", None, 2)
    assert (recipe.local.name, recipe.local.client_mode) == ("a=b", True)
    assert isinstance(recipe.base_model, dict) and recipe.base_model["n_layer"] == 3


def test_list_items_are_named_by_position_and_one_may_be_appended() -> None:
    recipe = small("datasets.0.weight=2", "datasets.1={source: files, path: texts}", "datasets.1.glob=*.md")
    first, second = recipe.datasets
    assert first.weight == 2 and isinstance(second, FilesDataset)
    assert (second.path, second.glob) == ("texts", "*.md")


def test_an_empty_section_can_be_filled_and_a_whole_one_replaced() -> None:
    recipe = small("local.port=5", "base_model={model_type: llama, hidden_size: 32}", text=SMALL + "local:\n")
    assert recipe.local.port == 5 and recipe.base_model == {"model_type": "llama", "hidden_size": 32}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "--set seed: expected key=value; write for example"),
        ("a..b=1", "expected key=value"),
        ("seed=abc", "--set seed=abc: seed should be a whole number, not 'abc'"),
        ("optimizer.lr=1", "--set optimizer.lr=1: unknown key optimizer.lr; did you mean learning_rate?"),
        ("seed.x=1", "seed holds a single value at"),
        ("run_id.x.y=1", "run_id holds a single value at small.yaml:1"),
        ("datasets.first.path=x", "datasets is a list, so 'first' must be a position from 0 to 1"),
        ("datasets.²=x", "must be a position"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(override: str, words: str) -> None:
    first = () if override.split(".")[0] != "seed" else ("seed=1",)
    assert words in refused(SMALL, *first, override)


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("target_batch_sise", "did you mean target_batch_size?"),
        ("learning_rate", "did you mean optimizer.learning_rate?"),
        ("warmup_steps", "did you mean lr_scheduler.warmup_epochs?"),
        ("tf32", "each volunteer chooses that; remove it, or write `local: {matmul_precision: high}`"),
        ("lr", "did you mean optimizer.learning_rate?"),
        ("num_epochs", "an epoch here is one optimizer step of the whole swarm"),
        ("initial_peers", "did you mean network.initial_peers?"),
        ("zzzz", "remove it; `swarm schema` lists the keys"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key: str, suggestion: str) -> None:
    assert refused(f"{SMALL}{key}: 1\n").startswith(f"small.yaml:11: unknown key {key}; {suggestion}")


def test_everything_that_is_wrong_is_said_at_once_each_with_its_line() -> None:
    text = (
        SMALL.replace("sequence_len: 16", "sequence_len: long").replace("run_id: small\n", "") + "local:\n  prot: 1\n"
    )
    assert refused(text).splitlines() == [
        "small.yaml:1: run_id is missing; add `run_id: …` (the run's name: up to 64 letters, digits, dots, dashes, "
        "underscores)",
        "small.yaml:8: sequence_len should be a whole number, not 'long'; sequence_len: tokens per sample",
        "small.yaml:11: unknown key local.prot; did you mean port?",
    ]


@pytest.mark.parametrize("key", [key for key in all_keys(Recipe) if key.count(".") < 2 and "datasets" not in key])
def test_whatever_is_wrong_with_a_field_reads_as_a_sentence(key: str) -> None:
    name, description = key.rpartition(".")[2], all_keys(Recipe)[key].description
    said = refused(SMALL, f"{key}=[[1]]")  # fits no field, not even one that is a list
    assert "Input" not in said
    for line in said.splitlines():
        assert f"; {name}: {description}" in line or " should be " not in line


def test_what_is_said_of_a_value_is_in_our_words_and_short() -> None:
    assert refused(SMALL, "max_epochs=soon") == (
        "--set max_epochs=soon: max_epochs should be a whole number, not 'soon'; "
        "max_epochs: the last epoch; null: until stopped"
    )
    assert refused(SMALL, "local.port=x").endswith("; port: port to listen on; 0: any free one (usually 0)")
    assert "local.name should be text in whole characters, not" in refused(SMALL, 'local.name="\\udcff"')
    assert len(refused(SMALL, "seed=" + "x" * 5000).split("should be")[1]) < 400


def test_contradictions_are_told_at_once_too_each_with_its_line() -> None:
    text = f"{SMALL}labels: [a, b]\nlora_r: 4\noptimizer:\n  name: sgd\n  betas: [0.9, 0.9]\nouter:\n  lr: 0.7\n"
    assert [line.partition(" has no meaning ")[::2] for line in refused(text).splitlines()] == [
        ("small.yaml:11: labels", "beside task: causal_lm; remove it, or take task: sequence_classification, "
         "token_classification or image_classification"),
        ("small.yaml:12: lora_r", "without adapter; remove it, or take adapter: lora"),
        ("small.yaml:15: optimizer.betas", "beside name: sgd; remove it, or take name: adamw, adam, muon, adamax, "
         "nadam or radam"),
        ("small.yaml:17: outer.lr", "without optimizer; remove it, or take optimizer: sgd, nesterov or adam"),
    ]  # fmt: skip


def test_what_is_switched_off_may_stand_where_it_means_nothing() -> None:
    assert small("load_in_8bit=false", "quantized_by=null", "sample_packing=false", "task=masked_lm").adapter is None
