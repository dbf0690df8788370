"""How much of a model each role holds, and where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from swarmcli.optim.config import Role
from swarmcli.peer import collaboration
from swarmcli.peer.collaboration import Collaboration
from swarmcli.peer.home import Home
from swarmcli.peer.peer import RunPeer
from swarmcli.training import Compute
from tests.training.small_tasks import small

LARGE = ("base_model.n_layer=4", "base_model.n_embd=1024", "base_model.n_head=4")  # 50 million parameters, 192 MiB


@contextmanager
def collaborating(directory: Path, role: Role, *overrides: str, **options: Any) -> Iterator[Collaboration]:
    recipe = small(directory, "local.host=127.0.0.1", *overrides)
    with Home.at(directory / "home") as home, RunPeer(recipe, role, home) as peer:
        made = Collaboration(peer, **options)
        try:
            yield made
        finally:
            made.close()


def test_an_auxiliary_has_the_shapes_of_a_model_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(collaboration, "outline_of", lambda recipe: torch.nn.Linear(2, 2, device="meta"))
        with collaborating(tmp_path, "auxiliary", auxiliary=True):
            pass  # whatever is loaded once
    before = psutil.Process().memory_info().rss
    with collaborating(tmp_path, "auxiliary", *LARGE, auxiliary=True) as made:
        assert sum(parameter.numel() for parameter in made.model.parameters()) > 50e6
        assert psutil.Process().memory_info().rss - before < 64 << 20


@pytest.mark.parametrize(("role", "places"), [("trainer", {"meta"}), ("monitor", {"cpu"})])
def test_a_monitor_holds_the_model_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role, places: set[str]
) -> None:
    """The meta device plays the one on which trainers compute."""
    monkeypatch.setattr(collaboration, "choose_compute", lambda recipe: Compute(torch.device("meta")))
    monkeypatch.setattr(collaboration, "Optimizer", lambda **options: FakeOptimizer())
    with collaborating(tmp_path, role) as made:
        assert {parameter.device.type for parameter in made.model.parameters()} == places


class FakeOptimizer:
    """Of a peer that is alone."""

    use_gradient_averaging, auxiliary = True, False
    param_groups = ()
    directory = SimpleNamespace(hearing=SimpleNamespace(answers=lambda peer: False), readers=[])
    core = SimpleNamespace(metrics=None)

    def report(self) -> SimpleNamespace:
        return SimpleNamespace(name="me", team="")

    def review_seat(self, divided: float = 1.0) -> None:
        """Its samples count."""

    def peers(self) -> dict[Any, Any]:
        return {}

    def shutdown(self) -> None:
        """Nothing was started."""
