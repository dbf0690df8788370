"""The averages of committed rounds are kept for a while, served by round and by tag, and never in the way."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round import archive as archive_module
from swarmcli.averaging.round.archive import KeptRound, RoundArchive
from swarmcli.averaging.round.plan import Layout
from swarmcli.compression import CompressionBase, NoCompression, Uniform8BitQuantization
from swarmcli.errors import StateDownloadError
from swarmcli.events import Event, PeerRefused
from swarmcli.network import PeerID
from swarmcli.state.snapshot import Snapshot
from tests.averaging.rounds import Kind, Swarm
from tests.simulation import simulated

TAG = b"lineage"


class Keepers:
    """A group that has averaged, each member with an archive; the last member's is empty: it missed the round."""

    def __init__(self, members: int = 3, codec: CompressionBase | None = None) -> None:
        allreduce = AllreduceOptions(compression=codec or NoCompression(), part_size_bytes=1024)
        self.swarm = Swarm([Kind(weight=1.0 + index) for index in range(members)], seed=7, options=allreduce)
        self.archives = [RoundArchive(peer.endpoint, "test") for peer in self.swarm.peers]
        self.layout = Layout.of(self.swarm.peers[0].tensors, allreduce.compression)

    async def __aenter__(self) -> Keepers:
        await self.swarm.__aenter__()
        for archive in self.archives:
            archive.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        for archive in self.archives:
            archive.close()
        await self.swarm.__aexit__(*exception)

    async def round(self, tag: bytes = TAG) -> RoundResult:
        """Runs one more round; all members but the last keep it."""
        group = self.swarm.group()
        outcomes = await asyncio.gather(*(self.swarm.take_part(peer, group) for peer in self.swarm.peers))
        results = [each for each in outcomes if isinstance(each, RoundResult)]
        for archive, result in zip(self.archives[:-1], results, strict=False):
            archive.keep(tag, result)
        self.group = group
        return results[0]

    @property
    def donors(self) -> list[PeerID]:
        return [peer.peer_id for peer in self.swarm.peers[:-1]]

    async def fetch(self, **wanted: object) -> KeptRound:
        return await self.archives[-1].fetch(self.donors, self.layout, timeout=30, **wanted)  # type: ignore[arg-type]


def kept(archive: RoundArchive) -> tuple[bytes, ...]:
    """The ids of the rounds in it, oldest first."""
    return tuple(kept.group_id for kept in archive._rounds)


def assert_is(kept: KeptRound, result: RoundResult) -> None:
    assert kept.record.digest == result.digest
    assert kept.record.contributors == result.contributors and kept.record.total_samples == result.total_weight
    for own, other in zip(kept.averages, result.averages, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("codec", [NoCompression(), Uniform8BitQuantization()], ids=["exact", "8 bits"])
@simulated
async def test_the_last_two_rounds_are_kept_and_the_newest_of_a_tag_is_served(codec: CompressionBase) -> None:
    async with Keepers(members=5, codec=codec) as keepers:
        ids = []
        for tag in (b"first", TAG, TAG):
            result = await keepers.round(tag)
            ids.append(keepers.group.group_id)
        assert kept(keepers.archives[0]) == tuple(ids[1:])
        assert_is(await keepers.fetch(tag=TAG, part_size_bytes=keepers.swarm.options.part_size_bytes), result)
        with pytest.raises(StateDownloadError, match="does not have that state"):
            await keepers.fetch(tag=b"first")


@simulated
async def test_a_donor_can_change_nothing_for_which_the_group_has_signed() -> None:
    """A donor that lies is passed over; if both lie, nothing is taken."""
    async with Keepers() as keepers:
        result = await keepers.round()
        events: list[Event] = []
        keepers.swarm.peers[-1].endpoint.events.subscribe(events.append)
        (told,) = keepers.archives[0]._rounds
        keepers.archives[0]._rounds[0] = replace(told, averages=[1.5 * average for average in told.averages])
        wanted = {"tag": TAG, "part_size_bytes": keepers.swarm.options.part_size_bytes}
        assert_is(await keepers.fetch(**wanted), result)
        record = msgspec.structs.replace(told.record, weights=told.record.weights[::-1])  # of the same sum
        await asyncio.sleep(30)  # the donors let go of their snapshots
        keepers.archives[1]._rounds[0] = replace(told, record=record)
        with pytest.raises(StateDownloadError, match=r"other weights|not what the digest"):
            await keepers.fetch(**wanted)
        refused = {event.peer: event.reason for event in events if isinstance(event, PeerRefused)}
        assert "not what the digest" in refused[keepers.donors[0].text]
        assert "other weights" in refused[keepers.donors[1].text]
        fewer, more = told.record.weights[0] / 2, told.record.weights[1] + told.record.weights[0] / 2
        record = msgspec.structs.replace(told.record, samples=(fewer, more, *told.record.weights[2:]))
        with pytest.raises(ValueError, match="other weights"):  # one member has some of another one's credit
            replace(told, record=record).prove(keepers.layout, keepers.swarm.options.part_size_bytes)


@simulated
async def test_averages_of_other_shapes_are_refused_before_they_are_fetched() -> None:
    async with Keepers() as keepers:
        await keepers.round()
        keepers.layout = Layout.of([torch.zeros(3)])
        with pytest.raises(StateDownloadError, match="other shapes"):
            await keepers.fetch(tag=TAG)


@pytest.mark.parametrize("metadata", [None, b"", b"\xc1", {"group_id": bytes(32)}])
@simulated
async def test_records_that_cannot_be_read(metadata: object) -> None:
    async with Keepers(2) as keepers:
        await keepers.round()
        archive = keepers.archives[0]
        provide = archive._provide

        async def spoiled(version: bytes) -> Snapshot | None:
            snapshot = await provide(version)
            return snapshot and replace(snapshot, metadata=metadata)

        archive._donor._pins._provide = spoiled
        with pytest.raises(StateDownloadError, match="record"):
            await keepers.fetch(tag=TAG)


@simulated
async def test_large_rounds_go_when_another_one_needs_memory_or_after_half_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer whose download has begun by then still gets all of it."""
    async with Keepers() as keepers:
        first = await keepers.round()
        monkeypatch.setattr(archive_module, "KEPT_BYTES", sum(each.nbytes for each in first.averages))
        await keepers.round()
        archive = keepers.archives[0]
        assert len(kept(archive)) == 2, "between rounds"
        archive.make_room()
        assert kept(archive) == (keepers.group.group_id,)
        monkeypatch.setattr(archive_module, "KEPT_BYTES", 0)
        monkeypatch.setattr(archive_module, "KEPT_SECONDS", 1.0)
        await keepers.round()
        keepers.swarm.network.set_bandwidth(keepers.swarm.peers[-1].peer_id, 2000.0)
        fetching = asyncio.create_task(keepers.fetch(tag=TAG))
        await asyncio.sleep(archive_module.KEPT_SECONDS + 1)
        assert not fetching.done() and not any(map(kept, keepers.archives))
        assert len((await fetching).averages) == len(first.averages)


@simulated
async def test_a_round_goes_to_disk_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Keepers() as keepers:
        result = await keepers.round()
        fetched = await keepers.fetch(tag=TAG)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert_is(await fetched.on_disk(), result)
    assert not any(await asyncio.to_thread(os.scandir, tmp_path))
    monkeypatch.setattr("swarmcli.state.unnamed_file._LEAVE_FREE", 1 << 60)
    with pytest.raises(OSError, match="no room"):
        await fetched.on_disk()
