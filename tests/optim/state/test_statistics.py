"""Statistics of a plain optimizer by their places, and of optimizers that keep them elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmcli.errors import OptimizerError
from swarmcli.network import Identity
from swarmcli.optim.state.averaging import statistic_slots
from swarmcli.optim.state.replica import InPlace, Replica
from swarmcli.optim.state.statistics import OwnStatistics, by_parameter, read_place
from swarmcli.optim.state.training_state import CapturedState, TrainingState
from swarmcli.state.assembly import Assembly
from swarmcli.state.snapshot import PinnedState, Snapshot, read_manifest
from tests.optim.state.test_training_state import OPTIMIZERS, SCHEDULERS, advance, make_state


@pytest.mark.parametrize(
    "place", ["exp_avg", "x/exp_avg", "-1/a", "01/a", "1/", "1/" + "a" * 65, "1" * 10 + "/a", "²/a"]
)
def test_what_is_no_place(place: str) -> None:
    with pytest.raises(ValueError, match="parameter index"):
        read_place(place)


def test_places_that_there_are_not() -> None:
    parameters = [torch.zeros(3)]
    assert by_parameter({"0/a": 1, "0/b/c": 2}, parameters) == {0: {"a": 1, "b/c": 2}}
    with pytest.raises(ValueError, match="only 1 parameters"):
        by_parameter({"1/a": 1}, parameters)
    with pytest.raises(ValueError, match="more than 16"):
        by_parameter({f"0/{name}": 1 for name in range(17)}, parameters)


def test_equal_states_are_captured_alike_whoever_stepped_first() -> None:
    one, other = make_state(1), make_state(1)
    for state, order in ((one, (0, 1)), (other, (1, 0))):
        for index in order:  # frozen layers that are thawed, for example, get their statistics later
            state.parameters[index].grad = torch.ones_like(state.parameters[index])
            state.optimizer.step()
            state.parameters[index].grad = None
    assert list(one.capture().tensors) == list(other.capture().tensors)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_in_a_file_is_restored_like_one_in_memory(optimizer: str, tmp_path: Path) -> None:
    donor, here, there = (make_state(seed, optimizer) for seed in (1, 2, 3))
    advance(donor, 3, seed=5)
    captured = donor.capture().clone()
    pinned = PinnedState(Snapshot(b"", None, captured.tensors))
    assembly = Assembly(pinned.manifest, read_manifest(pinned.manifest, 1 << 30), tmp_path)
    for chunk in range(pinned.layout.chunks):
        assert assembly.is_true(chunk, memoryview(b"".join(pinned.chunk(chunk))))
        assembly.note(chunk, Identity.from_seed(1).peer_id)
    here.restore(captured)
    there.restore(CapturedState(captured.metadata, assembly.finish().contents))
    for state in (donor, here, there):
        advance(state, 2, seed=6)
    assert donor.digest() == here.digest() == there.digest()


class Elsewhere(OwnStatistics):
    """Notes in which threads it is asked."""

    waits = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.threads: list[threading.Thread] = []

    def capture(self) -> Any:
        self.threads.append(threading.current_thread())
        return super().capture()

    @contextmanager
    def staged(self, *args: Any) -> Iterator[Callable[[], None]]:
        self.threads.append(threading.current_thread())
        with super().staged(*args) as install:
            yield install


def test_what_waits_for_others_is_never_asked_on_the_loop() -> None:
    parameters = [torch.randn(4, 3).requires_grad_(), torch.randn(3).requires_grad_()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    optimizer.statistics = elsewhere = Elsewhere(optimizer)
    state = TrainingState("run", optimizer, SCHEDULERS["lambda"](optimizer), extra_tensors=[torch.zeros(2)])
    assert state.statistics is elsewhere
    stepped: list[threading.Thread] = []

    async def main() -> None:
        replica = Replica(state, InPlace(state.parameters))
        await replica.change(lambda: stepped.append(threading.current_thread()))
        await replica.restore(await replica.capture())
        assert len(elsewhere.threads) == 2 and threading.current_thread() not in [*elsewhere.threads, *stepped]

    asyncio.run(main())


def test_statistics_in_other_processes_are_not_averaged() -> None:
    parameters = [torch.zeros(3).requires_grad_()]
    optimizer = torch.optim.AdamW(parameters)
    optimizer.statistics = Elsewhere(optimizer)
    assert list(statistic_slots(optimizer, ())) == []
    with pytest.raises(ValueError, match=r"average_opt_statistics=\('exp_avg',\): AdamW .* leave .* empty, or .* zero"):
        list(statistic_slots(optimizer, ("exp_avg",)))


class Keeps(torch.optim.SGD):
    """SGD that keeps something else of its first parameter as well."""

    what: Any = None
    name: Any = "kept"

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state[self.param_groups[0]["params"][0] if self.name != "beside" else "beside"][self.name] = self.what


@pytest.mark.parametrize(
    ("what", "name", "reason"),
    [
        ([torch.zeros(2)], "factors", "'factors' of parameter 0 is a list"),
        (torch.zeros(5, 5), "inverse", "'inverse' of parameter 0 has 25 elements, its parameter 3"),
        (torch.zeros(3).to_sparse(), "rows", "'rows' of parameter 0 is a torch.sparse_coo"),
        (torch.zeros(3, dtype=torch.complex32), "phase", "'phase' of parameter 0 is a torch.strided torch.complex32"),
        (1.0, "x" * 65, "expected <parameter index>/<name of the statistic>"),
        (1.0, "beside", "it keeps 'beside' beside the statistics"),
    ],
)
def test_an_optimizer_whose_statistics_cannot_travel_is_refused_after_its_first_step(
    what: Any, name: str, reason: str
) -> None:
    parameter = torch.zeros(3, requires_grad=True)
    optimizer = Keeps([parameter], lr=0.1)
    optimizer.what, optimizer.name = what, name
    state = TrainingState("run", optimizer)
    for _ in range(2):
        with pytest.raises(OptimizerError, match=reason):
            state.step([torch.ones(3)], state.position.after(bytes(32), 1))
    assert state.position.epoch == 0


@pytest.mark.parametrize("what", [None, 3, torch.tensor(2), torch.zeros(3)])
def test_numbers_and_tensors_like_the_parameter_travel(what: Any) -> None:
    optimizer = Keeps([torch.zeros(3, requires_grad=True)], lr=0.1)
    optimizer.what = what
    state = TrainingState("run", optimizer)
    state.step([torch.ones(3)], state.position.after(bytes(32), 1))
    newcomer = TrainingState("run", torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1))
    newcomer.restore(state.capture().clone())
    assert "kept" in newcomer.optimizer.state_dict()["state"][0]
