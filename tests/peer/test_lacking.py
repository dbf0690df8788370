"""Whole roles in one process: a peer without the weights that its run begins with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from swarmcli.errors import NoDonorReachable
from swarmcli.optim.peers.catch_up import CatchUp
from swarmcli.peer import collaboration
from swarmcli.recipe import Recipe
from swarmcli.training import load_checkpoint
from tests.peer.roles import Sums


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
    monkeypatch.setattr(CatchUp, "options", replace(CatchUp.options, alone_for=0.1, look_again=0.05))
    alone = pretrained("without", role=role)
    with pytest.raises(NoDonorReachable, match=r"the weights of .*, which whoever begins the run needs, are not on"):
        alone.end()
    assert not list(alone.home.glob("checkpoints/*"))
