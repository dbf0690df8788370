"""Tensors that lie elsewhere: read in pieces, donated without being in memory, and never by the loop."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.compression import TensorDescriptor
from swarmcli.compression.base import tensor_memory
from swarmcli.errors import SiteError, StateDownloadError
from swarmcli.events import PeerRefused
from swarmcli.state.distant import DistantTensor, fill, loaded
from swarmcli.state.snapshot import PinnedState, Snapshot
from tests.averaging.states import Swarm, check, make_state
from tests.simulation import in_real_time, simulated

pytestmark = pytest.mark.usefixtures("small_chunks")


class Elsewhere(DistantTensor):
    """A tensor that notes who reads how much of it, and may be lost."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(TensorDescriptor.of(tensor))
        self._memory = tensor_memory(tensor)
        self.reads: list[tuple[int, int]] = []
        self.readers: set[threading.Thread] = set()
        self.lost = False

    def read(self, begin: int, end: int) -> memoryview:
        if self.lost:
            raise SiteError("rank 3 is gone")
        self.reads.append((begin, end))
        self.readers.add(threading.current_thread())
        return memoryview(bytearray(self._memory[begin:end]))


def elsewhere(state: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor | Elsewhere]:
    return {name: Elsewhere(tensor) if name in names else tensor for name, tensor in state.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_copy_of_it(dtype: torch.dtype) -> None:
    tensor = torch.arange(35).reshape(5, 7).to(dtype)
    for target in (torch.empty(5, 7, dtype=dtype), torch.empty(7, 5, dtype=dtype).T):
        version = target._version
        fill(target, Elsewhere(tensor))
        assert torch.equal(target, tensor) and target._version > version
        fill(target, tensor.flip(0))
        assert torch.equal(target, tensor.flip(0))
    copy = loaded(tensor)
    assert torch.equal(copy, tensor) and copy.data_ptr() != tensor.data_ptr()


@settings(max_examples=20)
@given(st.permutations(list(make_state())), st.integers(0, 5))
def test_chunks_are_those_of_a_state_in_memory(names: list[str], count: int) -> None:
    state = make_state()
    here, there = Snapshot(b"v", {"epoch": 1}, state), Snapshot(b"v", {"epoch": 1}, elsewhere(state, *names[:count]))
    one, other = PinnedState(here), PinnedState(there)
    assert one.manifest == other.manifest
    for chunk in range(one.layout.chunks):
        assert b"".join(one.chunk(chunk)) == b"".join(other.chunk(chunk))
        assert not one.is_distant(chunk)


@simulated
async def test_donors_that_have_it_and_donors_that_have_not_give_parts_of_one_state() -> None:
    async with Swarm(2, bandwidth=100_000) as swarm:
        swarm.states[0] = Snapshot(b"v1", {"epoch": 3}, elsewhere(make_state(), "weight"))
        got = await swarm.download()
        check(got, swarm.states[1])
        assert set(got.donors) == set(swarm.ids)


@in_real_time
async def test_it_is_never_read_on_the_loop(tmp_path: Path) -> None:
    async with Swarm(1) as swarm:
        state = elsewhere(make_state(), "weight", "step")
        swarm.states[0] = Snapshot(b"v1", {"epoch": 3}, state)
        await swarm.download()
        assert state["weight"].readers and threading.current_thread() not in state["weight"].readers


@simulated
async def test_what_is_lost_ends_the_download_and_nothing_else() -> None:
    async with Swarm(1) as swarm:
        state = elsewhere(make_state(), "weight")
        swarm.states[0] = Snapshot(b"v1", {"epoch": 3}, state)
        state["weight"].lost = True
        with pytest.raises(StateDownloadError, match="cannot be read any more: rank 3 is gone"):
            await swarm.download()
        assert not any(isinstance(event, PeerRefused) for event in swarm.events)
        state["weight"].lost = False
        check(await swarm.download(), Snapshot(b"v1", {"epoch": 3}, make_state()))
