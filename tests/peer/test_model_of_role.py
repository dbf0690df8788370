"""How much of a model each role holds, and where; an auxiliary knows its shapes, and loads nothing that builds one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmcli.optim.config import Role
from swarmcli.peer import collaboration
from swarmcli.peer.collaboration import Collaboration
from swarmcli.peer.home import Home
from swarmcli.peer.joining import join_run
from swarmcli.training import Compute, build_task
from tests.training.small_tasks import small

PROGRAM = """
import sys, threading
from pathlib import Path
from swarmcli.cli import main, session
from swarmcli.peer.lifetime import Collaboration
from swarmcli.peer.home import Home
from swarmcli.peer.joining import join_run
from tests.training.small_tasks import small

assert threading.active_count() == 1, "importing starts nothing"
directory = Path(sys.argv[1])
recipe = small(directory, "local.host=127.0.0.1")
with Home.at(directory / "home") as home, join_run(recipe, "auxiliary", home) as peer:
    collaboration = Collaboration(peer, auxiliary=True)
    print([(list(p.shape), str(p.dtype), p.requires_grad, str(p.device)) for p in collaboration.model.parameters()])
    collaboration.close()
print([name for name in ("transformers", "datasets", "fastapi") if name in sys.modules])
"""


@pytest.mark.e2e
def test_an_auxiliary_has_the_outline_of_the_model_and_does_not_import_what_builds_it(tmp_path: Path) -> None:
    model = build_task(small(tmp_path)).build_model(outline=True)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=os.environ)
    outline = [(list(p.shape), str(p.dtype), p.requires_grad, "meta") for p in model.parameters()]
    assert (done.stdout.splitlines(), done.returncode) == ([str(outline), "[]"], 0), done.stderr


@pytest.mark.parametrize(("role", "places"), [("trainer", {"meta"}), ("monitor", {"cpu"})])
def test_a_monitor_holds_the_model_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role, places: set[str]
) -> None:
    """The meta device plays the one on which trainers compute."""
    monkeypatch.setattr(collaboration, "choose_compute", lambda recipe: Compute(torch.device("meta")))
    monkeypatch.setattr(collaboration.ModelTask, "try_model", lambda task, model, compute: None)
    monkeypatch.setattr(collaboration, "Optimizer", lambda **options: FakeOptimizer())
    recipe = small(tmp_path, "local.host=127.0.0.1")
    with Home.at(tmp_path / "home") as home, join_run(recipe, role, home) as peer:
        made = Collaboration(peer)
        try:
            assert {parameter.device.type for parameter in made.model.parameters()} == places
        finally:
            made.close()


class FakeOptimizer:
    """Of a peer that is alone."""

    use_gradient_averaging, auxiliary = True, False
    param_groups = ()
    directory = SimpleNamespace(is_there=lambda peer: False, readers=[])
    core = SimpleNamespace(metrics=None)

    def report(self) -> SimpleNamespace:
        return SimpleNamespace(name="me", team="")

    def call(self, wish: Any) -> None:
        """It has heard of no run."""

    def review_seat(self, divided: float = 1.0) -> None:
        """Its samples count."""

    def peers(self) -> dict[Any, Any]:
        return {}

    def shutdown(self) -> None:
        """Nothing was started."""
