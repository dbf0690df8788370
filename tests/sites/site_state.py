"""Training states whose statistics are shared out over the ranks of a site, and their plain twins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from swarmcli.optim.state.training_state import CapturedState, TrainingState
from swarmcli.sites.commands import LeaderCommands, StepVerdict, follow
from swarmcli.sites.sharded_optimizer import ShareOfOptimizer, SiteOptimizer
from swarmcli.sites.site import Site
from swarmcli.sites.step_sync import SharedModel, announce
from swarmcli.state.distant import loaded


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
def shared_out(
    site: Site, net: Any, groups: list[dict[str, Any]], made: Any, settings: dict[str, Any]
) -> Iterator[Any]:
    """At rank 0 the optimizer; at the others their share, which they step by commands after the block."""
    if site.rank:
        share = ShareOfOptimizer(groups, made, site=site, **settings)
        yield share
        try:
            follow(site, share.handlers)
        except BaseException:
            site.break_off()
            raise
        return
    commands = LeaderCommands(site)
    optimizer = SiteOptimizer(groups, made, commands=commands, shared=SharedModel(site, net), **settings)
    commands.open()
    try:
        yield optimizer
    finally:
        if commands.failed is None:
            commands.shut()
            announce(site, StepVerdict(0))


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
    """At rank 0 the state; None at the others, which follow commands after the block."""
    net = model(shapes, seed, odd)
    with Site.form(timeout=timeout) as site, shared_out(site, net, groups(net), *OPTIMIZERS[kind]) as optimizer:
        if site.rank:
            yield None
            return
        optimizer.statistics.spool = spool or optimizer.statistics.spool
        yield TrainingState("run", optimizer)


def advance(state: TrainingState, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        gradients = [torch.randn(parameter.shape, generator=generator) for parameter in state.trained]
        state.step(gradients, state.position.after(bytes([step]) * 32, 10))


def expect_equal(one: CapturedState, other: CapturedState) -> None:
    """To the last bit, in the same order, as manifests of equal states are."""
    assert one.metadata == other.metadata
    assert list(one.metadata["numbers"]) == list(other.metadata["numbers"])
    assert list(one.tensors) == list(other.tensors)
    for name, tensor in one.tensors.items():
        mine, theirs = loaded(tensor), loaded(other.tensors[name])
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        assert torch.equal(mine, theirs), name


def differing(found: Any, expected: Any) -> list[str]:
    """Where two nested states differ, bit for bit; empty: nowhere."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            return [f"{found!r:.80} for {expected!r:.80}"]
        return [f"{key}: {text}" for key in expected for text in differing(found[key], expected[key])]
    if isinstance(expected, torch.Tensor):
        same = isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    else:
        same = found == expected
    return [] if same else [f"{found!r:.80} for {expected!r:.80}"]
