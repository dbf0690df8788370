"""A checkpoint that does not fit changes nothing: not the state, nor an offloaded optimizer's copies, nor a seat."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarmcli.optim.state.buffers import Buffers
from swarmcli.optim.state.replica import InPlace, Offloaded, Replica
from swarmcli.optim.state.training_state import TrainingState
from tests.optim.state.test_training_state import advance


def replica(seed: int, *, offloaded: bool) -> tuple[Replica, list[torch.Tensor]]:
    """A replica, and its model's parameters."""
    generator = torch.Generator().manual_seed(seed)
    model = [
        torch.randn(4, 3, generator=generator).requires_grad_(),
        torch.randn(3, generator=generator).requires_grad_(),
    ]

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    place = Offloaded(model, make) if offloaded else None
    optimizer = place.optimizer if place else make(model)
    buffers = Buffers([torch.full((2,), float(seed)), torch.tensor(seed)])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = TrainingState("run", optimizer, scheduler, buffers.own, shared={"q": torch.zeros(2)})
    return Replica(state, place or InPlace(model), buffers=buffers), model


def snapshot(held: Replica, model: list[torch.Tensor]) -> list[Any]:
    captured = held.state.capture().clone()
    live = [tensor.detach().clone() for tensor in model]
    return [captured.metadata, sorted(captured.tensors), *captured.tensors.values(), *live]


def same(before: list[Any], after: list[Any]) -> bool:
    return all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(before, after, strict=True)
    )


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "other parameters": lambda saved: saved["swarm"].update(parameters="0" * 64),
    "no position": lambda saved: saved["swarm"].update(epoch=-1),
    "no lineage": lambda saved: saved["swarm"].update(lineage=5),
    "no scheduler": lambda saved: saved["swarm"].update(scheduler=None),
    "another schedule": lambda saved: saved["swarm"]["scheduler"].update(milestones=[3]),
    "another method": lambda saved: saved["swarm"].update(gradients={"q": torch.zeros(3)}),
    "a method that is none": lambda saved: saved["swarm"].update(gradients={"q": "zeros"}),
    "other buffers": lambda saved: saved["swarm"]["extra"].pop("0"),
    "another optimizer": lambda saved: saved["param_groups"][0].pop("betas"),
    "another number of groups": lambda saved: saved["param_groups"].append(saved["param_groups"][0]),
    "another number of parameters": lambda saved: saved["param_groups"][0]["params"].append(2),
    "statistics of no parameter": lambda saved: saved["state"].update({7: {"exp_avg": torch.zeros(3)}}),
    "statistics that are too large": lambda saved: saved["state"][0].update(exp_avg=torch.zeros(99)),
    "no statistics": lambda saved: saved.pop("state"),
    "nothing of the swarm": lambda saved: saved.pop("swarm"),
}


@pytest.mark.parametrize(
    ("name", "offloaded"),
    [*((name, True) for name in CHANGES), ("other parameters", False), ("statistics that are too large", False)],
)
def test_a_refused_checkpoint_changes_nothing(name: str, offloaded: bool) -> None:
    async def main() -> None:
        writer, _ = replica(1, offloaded=False)
        advance(writer.state, 3, seed=3)
        saved = copy.deepcopy(await writer.checkpoint())
        CHANGES[name](saved)
        reader, model = replica(2, offloaded=offloaded)
        advance(reader.state, 1, seed=4)
        with torch.no_grad():  # as its user has restored them; of an offloaded optimizer these are no copies
            for tensor, theirs in zip(model, writer.state.parameters, strict=True):
                tensor.copy_(theirs)
        before, generation = snapshot(reader, model), reader.generation
        with pytest.raises(ValueError, match=r"\w"):
            await reader.load_checkpoint(saved)
        assert same(before, snapshot(reader, model)) and reader.generation == generation

    asyncio.run(main())


@pytest.mark.parametrize("offloaded", [False, True], ids=["in place", "offloaded"])
def test_one_that_fits_is_taken_over_whole(offloaded: bool) -> None:
    async def main() -> None:
        writer, _ = replica(1, offloaded=False)
        advance(writer.state, 3, seed=3)
        saved = copy.deepcopy(await writer.checkpoint())
        reader, model = replica(2, offloaded=offloaded)
        with torch.no_grad():
            for tensor, theirs in zip(model, writer.state.parameters, strict=True):
                tensor.copy_(theirs)
        await reader.load_checkpoint(saved)
        one, other = writer.state.capture(), reader.state.capture()
        assert one.metadata == other.metadata and one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())

    asyncio.run(main())
