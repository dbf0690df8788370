"""Whole roles in one process: weights that a peer lacks, or that nobody trains, come from the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swarmcli.errors import CheckpointError, NoDonorReachable, RecipeError
from swarmcli.optim.peers import catch_up
from swarmcli.optim.state.frozen import FILE, frozen_of
from swarmcli.peer import collaboration
from swarmcli.recipe import Recipe
from swarmcli.training import load_checkpoint
from swarmcli.training.resumed import Resume
from tests.peer.roles import Sums


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


def test_a_newcomer_gets_them_once_and_checkpoints_are_whole(frozen: Any) -> None:
    named = (f"frozen_weights={digest_of('first')}",)
    first = frozen("first", settings=named)
    first.reach(2)
    second = frozen("the second", first, settings=named)
    second.reach(first.epoch + 2)
    first.leave()
    saved = second.leave()
    assert any("frozen weights, 256 B, came from" in notice for notice in second.notices)
    assert (second.home / FILE).exists() and not (first.home / FILE).exists()
    weights = load_checkpoint(Path(saved.rpartition(" at ")[2])).model
    assert frozen_of([], [("0.weight", weights["0.weight"])]).digest == digest_of("first")
    again = frozen("the second", settings=named)
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


class PretrainedSums(Sums):
    """As a model whose weights cannot be had: the names of peers say whether they have them."""

    def __init__(self, recipe: Recipe) -> None:
        self.lacks = "without" in recipe.local.name

    def build_model(self, *, outline: bool = False) -> nn.Module:
        model = super().build_model()
        model.lacks_weights = self.lacks  # type: ignore[assignment]
        if self.lacks:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(1e6)
        return model


@pytest.fixture
def pretrained(start: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(collaboration, "build_task", PretrainedSums)
    return start


def test_a_peer_without_the_first_weights_takes_the_runs_state_from_the_first_epoch_on(pretrained: Any) -> None:
    keeper = pretrained("monitor", role="monitor")
    newcomer = pretrained("without", keeper)
    newcomer.reach(2)
    saved = newcomer.leave()
    keeper.leave()
    weights = load_checkpoint(keeper.home / "checkpoints" / "latest").model
    assert all(tensor.abs().max() < 10 for tensor in weights.values()), f"nobody trained what was made up: {saved}"


@pytest.mark.parametrize("role", ["trainer", "monitor"])
def test_whoever_begins_a_run_needs_the_weights(pretrained: Any, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setattr(catch_up, "ALONE_FOR", 0.1)
    monkeypatch.setattr(catch_up, "LOOK_AGAIN", 0.05)
    alone = pretrained("without", role=role)
    with pytest.raises(NoDonorReachable, match=r"lacks the weights of .*, which the peer that begins the run needs"):
        alone.end()
    assert not list(alone.home.glob("checkpoints/*"))
