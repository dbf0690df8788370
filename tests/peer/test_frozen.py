"""Whole roles in one process: the weights that nobody trains come from the run, and stay in the home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swarmcli.errors import CheckpointError, RecipeError
from swarmcli.optim.state.frozen import FILE, frozen_of
from swarmcli.peer import collaboration
from swarmcli.recipe import Recipe
from swarmcli.training import load_checkpoint
from swarmcli.training.resumed import Resume
from tests.peer.roles import Sums
from tests.suites import soak


class FrozenSums(Sums):
    """The features go through a matrix that is not trained; what is here depends on the peer's name."""

    def __init__(self, recipe: Recipe) -> None:
        self.seed = len(recipe.local.name)

    def build_model(self, *, outline: bool = False) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), super().build_model())
        own = torch.Generator().manual_seed(self.seed)
        model[0].weight.requires_grad_(False).copy_(torch.randn(8, 8, generator=own) / 4)
        return model


@pytest.fixture
def frozen(start: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(collaboration, "build_task", FrozenSums)
    return start


def digest_of(name: str) -> str:
    model = nn.Linear(8, 8, bias=False)
    model.weight.requires_grad_(False).copy_(torch.randn(8, 8, generator=torch.Generator().manual_seed(len(name))) / 4)
    return frozen_of([], [("0.weight", model.weight)]).digest


@pytest.mark.parametrize("role", ["trainer", *soak(["monitor"])])
def test_a_newcomer_gets_them_once_and_checkpoints_are_whole(frozen: Any, role: str) -> None:
    named = (f"frozen_weights={digest_of('first')}",)
    first = frozen("first", settings=named)
    first.reach(2)
    second = frozen("the second", first, role=role, settings=named)
    second.reach(first.epoch + 2)
    first.leave()
    saved = second.leave()
    assert any("frozen weights, 256 B, came from" in notice for notice in second.notices)
    assert (second.home / FILE).exists() and not (first.home / FILE).exists()
    weights = load_checkpoint(Path(saved.rpartition(" at ")[2])).model
    assert frozen_of([], [("0.weight", weights["0.weight"])]).digest == digest_of("first")
    again = frozen("the second", role=role, settings=named)
    if role == "trainer":
        again.reach(second.epoch + 1)
    again.leave()
    assert not any("frozen weights" in notice for notice in again.notices), "they are in its home"


def test_a_recipe_has_to_name_them_and_a_checkpoint_over_others_says_what_to_name(frozen: Any) -> None:
    named = f"add what names the ones that are here, `frozen_weights: {digest_of('it')}`"
    with pytest.raises(RecipeError, match=named):
        frozen("it").end()
    first = frozen("first", settings=(f"frozen_weights={digest_of('first')}", "run_id=old"))
    first.reach(2)
    saved = first.leave().rpartition(" at ")[2]
    other = f"frozen_weights={digest_of('another')}"
    again = frozen("another", settings=(other, "run_id=new"), resume=Resume(saved, "old"))
    told = rf"frozen_weights: {digest_of('first')}; the recipe: .*name the checkpoint"
    with pytest.raises(CheckpointError, match=told):
        again.end()
