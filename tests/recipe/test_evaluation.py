from __future__ import annotations

import pytest

from swarmcli.recipe import HuggingFaceDataset, digest_of

from .recipes import SMALL, refused, small

SPLIT = "evaluation={every_epochs: 5, dataset: {source: huggingface, path: a/b, split: validation}}"


def test_left_alone_nothing_is_evaluated_and_nothing_held_out() -> None:
    evaluation = small().evaluation
    assert (evaluation.every_epochs, evaluation.held_out, evaluation.dataset) == (0, 0.0, None)


@pytest.mark.parametrize(
    "differs", ["every_epochs=6", "samples=9", "early_stopping_patience=2", f"evaluator={'a' * 52}"]
)
def test_what_three_measure_and_by_what_the_run_ends_must_agree(differs: str) -> None:
    held = "evaluation={held_out: 0.02, every_epochs: 5}"
    assert digest_of(small(held)) != digest_of(small(held, f"evaluation.{differs}"))
    assert digest_of(small("evaluation.held_out=0.02")) != digest_of(small())
    assert digest_of(small(SPLIT)) != digest_of(small())


def test_another_split_of_the_training_data_may_be_named() -> None:
    recipe = small(SPLIT, "datasets=[{source: huggingface, path: a/b}]")
    assert isinstance(recipe.evaluation.dataset, HuggingFaceDataset) and recipe.evaluation.dataset.split == "validation"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["evaluation.every_epochs=5"], "an evaluation needs data that nobody trains on; add `held_out: 0.02`"),
        (["evaluation={held_out: 0.1, dataset: {source: stdlib}}"], "remove held_out, or dataset"),
        (["evaluation.early_stopping_patience=3"], "the run is never evaluated; set every_epochs"),
        (["evaluation={held_out: 0.1, every_epochs: 5, evaluator: ada}"], "'ada' is no peer id: expected 52"),
        (["val_set_size=0.1"], "nothing evaluates on what it holds out; add `evaluation: {every_epochs"),
        (["val_set_size=0.1", "evaluation={every_epochs: 5, held_out: 0.1}"], "the same as evaluation.held_out"),
        (
            ["datasets=[{source: files, path: t}]", "evaluation.dataset={source: files, path: t, weight: 2}"],
            "the run trains on this dataset; name another one",
        ),
    ],
)
def test_an_evaluation_on_what_is_trained_on_is_refused(overrides: list[str], words: str) -> None:
    assert words in refused(SMALL, *overrides)


def test_axolotls_name_for_the_share_that_is_held_out_is_known() -> None:
    recipe = small("val_set_size=0.1", "evaluation.every_epochs=5", "datasets=[{source: huggingface, path: a/b}]")
    assert recipe.held_out == 0.1
