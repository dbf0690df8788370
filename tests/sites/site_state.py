"""Training states whose statistics are shared out over the ranks of a site, and their plain twins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from swarmcli.optim.state.training_state import TrainingState
from swarmcli.sites.commands import CommandFollower, LeaderCommands
from swarmcli.sites.sharded_optimizer import ShareOfOptimizer, SiteOptimizer
from swarmcli.sites.site import Site
from swarmcli.sites.step_sync import SharedModel


class Counted(torch.optim.SGD):
    """Keeps statistics that are no tensors."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"], state["kind"] = state.get("steps", 0) + 1, "counted"
        return super().step(closure)


SHAPES = [(300, 40), (7,), (50, 50), (), (4000,)]
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.02, "amsgrad": True}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.02}),
    "counted": (Counted, {"lr": 0.02, "momentum": 0.9}),
    "averaged": (torch.optim.ASGD, {"lr": 0.02}),
}
Shapes = list[tuple[int, ...]]


def model(shapes: Shapes, seed: int = 0, odd: bool = False) -> torch.nn.ParameterList:
    """`odd`: in several types, one parameter frozen, another not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    if odd:
        values[0], values[1], values[2] = values[0].bfloat16(), values[1].double(), values[2].T
    net = torch.nn.ParameterList(values)
    net[4].requires_grad_(not odd)
    return net


def groups(net: torch.nn.ParameterList) -> list[dict[str, Any]]:
    return [{"params": list(net)[:2]}, {"params": list(net)[2:], "lr": 0.01}]


def plain_state(kind: str = "adamw", *, seed: int = 0, shapes: Shapes = SHAPES, odd: bool = False) -> TrainingState:
    made, settings = OPTIMIZERS[kind]
    return TrainingState("run", made(groups(model(shapes, seed, odd)), **settings))


@contextmanager
def site_state(
    kind: str = "adamw",
    *,
    seed: int = 0,
    shapes: Shapes = SHAPES,
    odd: bool = False,
    spool: Path | None = None,
    timeout: float = 10.0,
) -> Iterator[TrainingState | None]:
    """At rank 0 the state; None at the others, which follow commands until rank 0 has left the block."""
    made, settings = OPTIMIZERS[kind]
    site, net = Site.form(timeout=timeout), model(shapes, seed, odd)
    if site.rank == 0:
        commands = LeaderCommands(site)
        optimizer = SiteOptimizer(groups(net), made, commands=commands, shared=SharedModel(site, net), **settings)
        optimizer.statistics.spool = spool or optimizer.statistics.spool
        try:
            yield TrainingState("run", optimizer)
        finally:
            if commands.failed is None:
                commands.close()
            site.close()
    else:
        share = ShareOfOptimizer(groups(net), made, site=site, **settings)
        follower = CommandFollower(site, share.handlers)
        follower.start()
        yield None
        follower.join()
        site.close()


def advance(state: TrainingState, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        gradients = [torch.randn(parameter.shape, generator=generator) for parameter in state.trained]
        state.step(gradients, state.position.after(bytes([step]) * 32, 10))
