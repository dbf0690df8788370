"""Downloads that go through a file: the same states come out, and only what is on its way is in memory."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmcli.compression import BlockwiseQuantization, Float16Compression, NoCompression
from swarmcli.errors import StateDownloadError
from swarmcli.events import PeerRefused
from swarmcli.network import Identity
from swarmcli.state import assembly as assembly_module
from swarmcli.state import unnamed_file
from swarmcli.state.assembly import Assembly
from swarmcli.state.distant import DistantTensor, loaded
from swarmcli.state.donor import StateDonor
from swarmcli.state.download import download_state
from swarmcli.state.snapshot import PinnedState, Snapshot, read_manifest
from tests.averaging.states import CHUNK, Swarm, check, make_state, size_of
from tests.simulation import simulated

pytestmark = pytest.mark.usefixtures("small_chunks")


STRANGER = Identity.from_seed(1).peer_id


def assembled(pinned: PinnedState, spool: Path) -> Assembly:
    assembly = Assembly(pinned.manifest, read_manifest(pinned.manifest, 1 << 30), spool)
    for chunk in reversed(range(pinned.layout.chunks)):
        assert assembly.is_true(chunk, memoryview(b"".join(pinned.chunk(chunk))))
        assembly.note(chunk, STRANGER)
    return assembly


def test_the_file_has_no_name_and_goes_with_its_last_tensor(tmp_path: Path) -> None:
    pinned = PinnedState(Snapshot(b"", None, make_state()))
    assembly = assembled(pinned, tmp_path)
    weight = assembly.finish().contents["weight"]
    descriptor = assembly._file._file.fileno()
    assert not list(tmp_path.iterdir())
    del assembly
    gc.collect()
    assert torch.equal(loaded(weight), make_state()["weight"])
    del weight
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize(
    ("codec", "donors"), [(NoCompression(), 3), (Float16Compression(), 1), (BlockwiseQuantization(), 1)]
)
@simulated
async def test_a_download_through_a_file_is_the_one_through_memory(tmp_path: Path, codec: Any, donors: int) -> None:
    async with Swarm(donors, bandwidth=200_000) as swarm:
        swarm.states = [Snapshot(b"v1", {"epoch": 3}, make_state(), codec)] * donors
        expected = await swarm.download()
        got = await swarm.download(spool=tmp_path)
        assert all(isinstance(tensor, DistantTensor) for tensor in got.contents.values())
        check(got, Snapshot(b"v1", {"epoch": 3}, expected.tensors))
        assert (got.exact, got.root, got.digests) == (expected.exact, expected.root, expected.digests)


@simulated
async def test_only_chunks_on_their_way_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most, unwritten = 0, assembly_module.unwritten
    slots: list[weakref.ref[memoryview]] = []

    def counting(nbytes: int) -> memoryview:
        nonlocal most
        memory = unwritten(nbytes)
        slots.append(weakref.ref(memory))
        most = max(most, sum(each() is not None for each in slots))
        return memory

    monkeypatch.setattr(assembly_module, "unwritten", counting)
    async with Swarm(4, bandwidth=500_000) as swarm:
        swarm.states = [Snapshot(b"v1", {"epoch": 3}, make_state(size=300_000))] * 4
        check(await swarm.download(spool=tmp_path), swarm.states[0])
        assert 1 < most <= 16 < size_of(swarm.states[0]) // CHUNK // 10


@simulated
async def test_what_went_through_a_file_is_handed_on_from_there(tmp_path: Path) -> None:
    async with Swarm(1, 2) as swarm:

        async def nothing(version: bytes) -> None:
            return None

        first, second = swarm.endpoints[1:]
        lender = StateDonor(first, "test", nothing)
        lender.start()
        with lender.expecting(b"v1") as lend:
            state = await swarm.download(spool=tmp_path, version=b"v1")
            lend(state.snapshot(), state.root)
        got = await download_state(second, "test", [first.peer_id], version=b"v1", timeout=10)
        check(got, swarm.states[0])
        lender.close()


@simulated
async def test_too_little_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unnamed_file, "_LEAVE_FREE", 1 << 60)
    async with Swarm(1) as swarm:
        with pytest.raises(StateDownloadError, match="no room for a state of"):
            await swarm.download(spool=tmp_path)
        assert not any(isinstance(event, PeerRefused) for event in swarm.events), "the donor is honest"
