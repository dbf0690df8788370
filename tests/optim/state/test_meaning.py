"""Peers with unlike versions of torch hold equal states, hand them to each other, and read each other's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarmcli.optim.state.lineage import LineagePosition
from swarmcli.optim.state.training_state import TrainingState
from swarmcli.state.snapshot import PinnedState, Snapshot
from tests.optim.state.test_training_state import advance, travelled

# Optimizers and schedulers with the keys of torch 2.6 in their states: what a peer with that version shows

NEWER = {"decoupled_weight_decay"}  # keys of AdamW's groups that 2.6 does not know


class OldAdamW(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        groups = [{key: group[key] for key in group if key not in NEWER} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            assert not NEWER & set(group), "torch 2.6 would keep it and show it to others"
        groups = [{**group, "decoupled_weight_decay": True} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})


class OldLambdaLR(torch.optim.lr_scheduler.LambdaLR):
    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "_is_initial"} | {"verbose": False}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert "_is_initial" not in state_dict
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "verbose"})


class OldSequentialLR(torch.optim.lr_scheduler.SequentialLR):
    """As older PyTorch saves it: its parts note one step more than those of 2.13, and not whether they are new."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        parts = [
            {key: value for key, value in part.items() if key != "_is_initial"}
            | {"verbose": False, "_step_count": part["_step_count"] + 1}
            for part in state["_schedulers"]
        ]
        return {**state, "_schedulers": parts}


def old_adamw(params: Any) -> torch.optim.Optimizer:
    return OldAdamW(params, lr=0.01, foreach=False)


# As classes of torch are: what is private in them is torch's own.
for kind in (OldLambdaLR, OldSequentialLR):
    kind.__module__ = "torch.optim.lr_scheduler"


# Both versions

L = torch.optim.lr_scheduler


def sequence(kind: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Any:
    return kind(optimizer, [L.LinearLR(optimizer), L.CosineAnnealingLR(optimizer, 10)], milestones=[3])


SCHEDULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "lambda": (
        lambda optimizer: OldLambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
        lambda optimizer: L.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    ),
    "sequential": (
        lambda optimizer: sequence(OldSequentialLR, optimizer),
        lambda optimizer: sequence(L.SequentialLR, optimizer),
    ),
}


def new_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, foreach=True)


def peer(*, old: bool, seed: int, schedule: str) -> TrainingState:
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.randn(4, 3, generator=generator).requires_grad_()]
    optimizer = (old_adamw if old else new_adamw)(parameters)
    return TrainingState("run", optimizer, SCHEDULES[schedule][0 if old else 1](optimizer))


def manifest(state: TrainingState) -> bytes:
    captured = state.capture()
    return PinnedState(Snapshot(b"version", captured.metadata, captured.tensors)).manifest


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("old_donor", [True, False])
def test_a_newcomer_with_another_version_goes_on_bit_identically(schedule: str, old_donor: bool) -> None:
    donor = peer(old=old_donor, seed=1, schedule=schedule)
    newcomer = peer(old=not old_donor, seed=2, schedule=schedule)
    advance(donor, 5, seed=3)
    newcomer.restore(travelled(donor.capture()))
    assert manifest(newcomer) == manifest(donor), "what is hashed does not say who made it"
    for state in (donor, newcomer):
        advance(state, 5, seed=6)
    assert newcomer.digest() == donor.digest()
    assert manifest(newcomer) == manifest(donor)
    assert newcomer.scheduler.get_last_lr() == donor.scheduler.get_last_lr()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("old_writer", [True, False])
def test_a_checkpoint_of_another_version_is_read(schedule: str, old_writer: bool) -> None:
    writer = peer(old=old_writer, seed=1, schedule=schedule)
    reader = peer(old=not old_writer, seed=1, schedule=schedule)
    advance(writer, 5, seed=3)
    saved = writer.checkpoint()
    # As former versions of swarm wrote it.
    former = {**saved, "swarm": {**saved["swarm"], "scheduler": writer.scheduler.state_dict()}}
    for checkpoint in (saved, former):
        with torch.no_grad():
            reader.parameters[0].copy_(writer.parameters[0])
        reader.read_checkpoint(checkpoint)()
        assert manifest(reader) == manifest(writer)
    assert reader.optimizer.param_groups[0]["foreach"] is old_writer, "how it computes is each peer's own"


def test_what_is_off_may_be_left_out_and_comes_back_as_off() -> None:
    donor, newcomer = (peer(old=False, seed=seed, schedule="lambda") for seed in (1, 2))
    newcomer.optimizer.param_groups[0]["amsgrad"] = True
    newcomer.restore(travelled(donor.capture()))
    assert newcomer.optimizer.param_groups[0]["amsgrad"] is False
    donor.optimizer.param_groups[0]["amsgrad"] = True
    newcomer.restore(travelled(donor.capture()))
    assert newcomer.optimizer.param_groups[0]["amsgrad"] is True


def linear(epochs: int) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optimizer: L.LinearLR(optimizer, 1.0, 0.0, total_iters=epochs)


def warmed(epochs: int) -> Callable[[torch.optim.Optimizer], Any]:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        parts = [L.LinearLR(optimizer, 0.5, 1.0, 2), L.CosineAnnealingLR(optimizer, epochs - 2)]
        return L.SequentialLR(optimizer, parts, [2])

    return make


def state_with(make: Callable[[torch.optim.Optimizer], Any], epochs: int, lr: float = 0.5) -> TrainingState:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr)
    state = TrainingState("run", optimizer, make(optimizer))
    for epoch in range(epochs):
        state.step([torch.zeros(2)], LineagePosition(epoch + 1, epoch + 1, bytes(32)))
    return state


def rates(state: TrainingState, more: int) -> list[float]:
    found = []
    for _ in range(more):
        found.append(state.optimizer.param_groups[0]["lr"])
        state.end_epoch(state.position)
    return found


@pytest.mark.parametrize("make", [linear, warmed])
def test_who_resumes_with_a_longer_schedule_gets_it_and_is_told(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """At the end of the checkpoint's own schedule the rate is 0, which no recursive formula leaves again."""
    saved = state_with(make(4), 4).checkpoint()
    longer = state_with(make(8), 0)
    longer.read_checkpoint(saved)()
    assert longer.position.epoch == 4
    assert rates(longer, 4) == pytest.approx(rates(state_with(make(8), 4), 4))
    assert "not the checkpoint's (unlike: " in caplog.text


def test_an_equal_schedule_goes_on_as_the_checkpoint_says(caplog: pytest.LogCaptureFixture) -> None:
    saved = state_with(linear(8), 4).checkpoint()
    again = state_with(linear(8), 0)
    again.read_checkpoint(saved)()
    assert rates(again, 4) == rates(state_with(linear(8), 4), 4)
    assert not caplog.text
