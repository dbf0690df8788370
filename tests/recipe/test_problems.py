from __future__ import annotations

import pytest

from swarmcli.recipe import Recipe
from swarmcli.recipe.problems import _as_end, all_keys, as_written

from .recipes import SMALL, refused


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("target_batch_sise", "did you mean target_batch_size?"),
        ("learning_rate", "did you mean optimizer.learning_rate?"),
        ("warmup_step", "did you mean lr_scheduler.warmup_epochs?"),
        ("lr", "did you mean optimizer.learning_rate?"),
        ("num_epochs", "an epoch here is one optimizer step of the whole swarm"),
        ("initial_peers", "did you mean network.initial_peers?"),
        ("zzzz", "remove it, or take one that is known here: access, adapter, averaging, base_model, chat_template"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key: str, suggestion: str) -> None:
    assert refused(f"{SMALL}{key}: 1\n").startswith(f"small.yaml:11: unknown key {key}; {suggestion}")


def test_everything_that_is_wrong_is_said_at_once_each_with_its_line() -> None:
    text = (
        SMALL.replace("sequence_len: 16", "sequence_len: long").replace("run_id: small\n", "") + "local:\n  prot: 1\n"
    )
    assert refused(text).splitlines() == [
        "small.yaml:1: run_id is missing; add `run_id: …` (the name of the run: up to 64 letters, digits, dots, "
        "dashes, underscores)",
        "small.yaml:8: sequence_len should be a whole number, not 'long'; sequence_len: tokens per sample, where the "
        "task reads texts",
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
        "max_epochs: the run ends behind this epoch; null: when it is stopped"
    )
    assert refused(SMALL, "local.port=x").endswith("; port: the port to listen on; 0: any free one (usually 0)")
    assert "local.name should be text in whole characters, not" in refused(SMALL, 'local.name="\\udcff"')
    assert len(refused(SMALL, "seed=" + "x" * 5000).split("should be")[1]) < 400
    assert _as_end("Input should be a valid date") == "a valid date"
    assert _as_end("Decimal input has too many digits") == "valid (Decimal input has too many digits)"


def test_all_keys_names_every_leaf_once() -> None:
    keys = all_keys(Recipe).keys()
    assert {"run_id", "datasets", "datasets.glob", "optimizer.betas", "local.port"} <= keys
    assert not {"optimizer", "local", "network"} & keys


def test_defaults_are_shown_as_they_would_be_written() -> None:
    values = (True, None, (0.9, 0.999), 1e-8, (), "x")
    assert list(map(as_written, values)) == ["true", "null", "[0.9, 0.999]", "1e-08", "[]", "x"]


def test_a_word_that_stands_elsewhere_wins_over_a_like_one_here() -> None:
    assert "did you mean lr_scheduler.warmup_epochs?" in refused(SMALL, "warmup_steps=10")
    assert "or write `local: {matmul_precision: high}`" in refused(SMALL, "tf32=true")
