from __future__ import annotations

import pytest

from swarmcli.recipe import HuggingFaceDataset, digest_of

from .recipes import SMALL, refused, small

SPLIT = "evaluation={every_epochs: 5, dataset: {source: huggingface, path: a/b, split: validation}}"


def test_left_alone_nothing_is_evaluated_and_nothing_held_out() -> None:
    evaluation = small().evaluation
    assert (evaluation.every_epochs, evaluation.held_out, evaluation.dataset) == (0, 0.0, None)


def test_how_often_is_for_each_to_choose_and_on_what_must_agree() -> None:
    held = "evaluation.held_out=0.02"
    assert digest_of(small(held)) == digest_of(small(held, "evaluation.every_epochs=5", "evaluation.samples=9"))
    assert digest_of(small(held)) != digest_of(small())
    assert digest_of(small(SPLIT)) != digest_of(small())


def test_another_split_of_the_training_data_may_be_named() -> None:
    recipe = small(SPLIT, "datasets=[{source: huggingface, path: a/b}]")
    assert isinstance(recipe.evaluation.dataset, HuggingFaceDataset) and recipe.evaluation.dataset.split == "validation"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["evaluation.every_epochs=5"], "an evaluation needs text that nobody trains on; add `held_out: 0.02`"),
        (["evaluation={held_out: 0.1, dataset: {source: stdlib}}"], "remove held_out, or dataset"),
        (["evaluation.held_out=0.6"], "evaluation.held_out should be at most 0.5"),
        (
            ["evaluation.held_out=0.1", "datasets=[{source: huggingface, path: a/b}]"],
            "only of files and stdlib datasets a share can be held out",
        ),
        (
            ["datasets=[{source: files, path: t}]", "evaluation.dataset={source: files, path: t, weight: 2}"],
            "the run trains on this dataset; name another one",
        ),
    ],
)
def test_an_evaluation_on_what_is_trained_on_is_refused(overrides: list[str], words: str) -> None:
    assert words in refused(SMALL, *overrides)
