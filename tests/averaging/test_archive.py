"""The averages of committed rounds are kept on disk, served by round and by tag, and never in the way."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from swarmcli.averaging.archive.archive import ArchiveOptions, RoundArchive
from swarmcli.averaging.archive.kept_round import KeptRound, replay_prefix, version_of_group, version_of_tag
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.allreduce import AllreduceResult
from swarmcli.averaging.round.plan import Layout, Plan
from swarmcli.compression import CompressionBase, NoCompression, Uniform8BitQuantization
from swarmcli.errors import StateDownloadError
from swarmcli.events import Event, Noticed, PeerRefused
from swarmcli.network import Endpoint, Identity, PeerID
from swarmcli.state import unnamed_file as unnamed_file_module
from swarmcli.state.snapshot import Snapshot
from swarmcli.testing import MemoryNetwork, virtual_time
from tests.averaging.rounds import Kind, Swarm
from tests.averaging.states import trickle
from tests.simulation import in_real_time, simulated

TAG = b"lineage"


class Keepers:
    """A group that has averaged, each member with an archive; the last member's is empty: it missed the round."""

    def __init__(self, members: int = 3, codec: CompressionBase | None = None, **options: object) -> None:
        allreduce = AllreduceOptions(compression=codec or NoCompression(), part_size_bytes=1024)
        self.swarm = Swarm([Kind(weight=1.0 + index) for index in range(members)], seed=7, options=allreduce)
        self.archives = [RoundArchive(peer.endpoint, "test", **options) for peer in self.swarm.peers]  # type: ignore[arg-type]
        self.layout = Layout.of(self.swarm.peers[0].tensors, allreduce.compression)

    async def __aenter__(self) -> Keepers:
        await self.swarm.__aenter__()
        for archive in self.archives:
            archive.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        for archive in self.archives:
            await archive.close()
        await self.swarm.__aexit__(*exception)

    async def round(self, tag: bytes = TAG) -> AllreduceResult:
        """One more round; all members but the last keep it."""
        group = self.swarm.group()
        outcomes = await asyncio.gather(*(self.swarm.take_part(peer, group) for peer in self.swarm.peers))
        results = [each for each in outcomes if isinstance(each, AllreduceResult)]
        for archive, result in zip(self.archives[:-1], results, strict=False):
            archive.keep(group.group_id, tag, result)
            await archive.written()
        self.group = group
        return results[0]

    @property
    def donors(self) -> list[PeerID]:
        return [peer.peer_id for peer in self.swarm.peers[:-1]]

    async def fetch(self, **wanted: object) -> KeptRound:
        return await self.archives[-1].fetch(self.donors, self.layout, timeout=30, **wanted)  # type: ignore[arg-type]

    @property
    def plan(self) -> Plan:
        options = self.swarm.options
        return Plan.make(self.layout, self.group.part_shares, options.part_size_bytes)


def kept(archive: RoundArchive) -> tuple[bytes, ...]:
    """The ids of the rounds in it, oldest first."""
    return tuple(stored.record.group_id for stored in archive._rounds)


def assert_is(kept: KeptRound, result: AllreduceResult) -> None:
    assert kept.record.digest == result.digest
    assert kept.record.contributors == result.contributors and kept.record.total_samples == result.total_weight
    for own, other in zip(kept.averages, result.averages, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("codec", [NoCompression(), Uniform8BitQuantization()], ids=["exact", "8 bits"])
@simulated
async def test_a_late_member_gets_what_its_group_committed(codec: CompressionBase) -> None:
    async with Keepers(codec=codec) as keepers:
        result = await keepers.round()
        group_id = keepers.group.group_id
        kept = await keepers.fetch(group_id=group_id, plan=keepers.plan, digest=result.digest)
        assert_is(kept, result)
        parts = kept.parts(keepers.plan)
        assert [(p.part.index, p.senders, p.weights, p.digest) for p in parts] == [
            (p.part.index, p.senders, p.weights, p.digest) for p in result.parts
        ]
        assert_is(await keepers.fetch(tag=TAG), result)
        with pytest.raises(StateDownloadError, match="does not have that state"):
            await keepers.fetch(group_id=bytes(32))
        with pytest.raises(StateDownloadError, match="another result"):
            await keepers.fetch(group_id=group_id, digest=bytes(32))


@simulated
async def test_a_donor_cannot_change_the_weights_for_which_the_group_has_signed() -> None:
    async with Keepers(members=5) as keepers:
        result = await keepers.round()
        signed = {"group_id": keepers.group.group_id, "part_size_bytes": keepers.swarm.options.part_size_bytes}
        assert_is(await keepers.fetch(**signed), result)
        await asyncio.sleep(30)  # the donors let go of their snapshots
        for archive in keepers.archives[:-1]:
            stored = archive._rounds.pop()
            record = msgspec.structs.replace(stored.record, weights=stored.record.weights[::-1])  # of the same sum
            archive._rounds.append(replace(stored, record=record))
        with pytest.raises(StateDownloadError, match="other weights"):
            await keepers.fetch(**signed)


@simulated
async def test_the_last_two_rounds_are_kept_and_the_newest_of_a_tag_is_served() -> None:
    async with Keepers() as keepers:
        results, ids = [], []
        for _ in range(3):
            results.append(await keepers.round())
            ids.append(keepers.group.group_id)
        assert kept(keepers.archives[0]) == tuple(ids[1:])
        assert_is(await keepers.fetch(tag=TAG), results[2])
        assert_is(await keepers.fetch(group_id=ids[1]), results[1])
        with pytest.raises(StateDownloadError):
            await keepers.fetch(group_id=ids[0])


@simulated
async def test_keys_that_hold_kept_rounds_keep_nobody_from_the_next() -> None:
    """They ask for one chunk in 50 s, of a round by its group and by its tag: two states in use."""
    async with Keepers() as keepers, asyncio.TaskGroup() as tasks:
        await keepers.round()
        prefix, stranger = replay_prefix("test"), keepers.swarm.peers[1].endpoint
        versions = version_of_group(keepers.group.group_id), version_of_tag(TAG)
        held = [tasks.create_task(trickle(stranger, keepers.donors[0], each, prefix)) for each in versions]
        await asyncio.sleep(1)
        result = await keepers.round(b"next")
        kept = await keepers.archives[-1].fetch(keepers.donors[:1], keepers.layout, tag=b"next", timeout=30)
        assert_is(kept, result)
        for each in held:
            each.cancel()


@simulated
async def test_a_file_is_not_used_again_while_somebody_reads_it() -> None:
    async with Keepers() as keepers:
        first = await keepers.round()
        archive = keepers.archives[0]
        snapshot = archive._rounds[0].snapshot(b"")
        for _ in range(4):
            for peer in keepers.swarm.peers:
                peer.tensors[0].add_(1.0)
            await keepers.round()
        for index, average in enumerate(first.averages):
            assert torch.equal(snapshot.tensors[str(index)], average)


@simulated
async def test_files_are_used_again_have_no_name_and_are_gone_after_the_end(tmp_path: Path) -> None:
    def open_files() -> int:
        """Those of the archives alone: what earlier tests had open may go meanwhile."""
        places = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        return sum(place.startswith(str(tmp_path)) for place in places)

    def names() -> list[Path]:
        return list(tmp_path.iterdir())

    before = open_files()
    async with Keepers(directory=tmp_path) as keepers:
        await keepers.round()
        for _ in range(3):
            await keepers.round()
            await keepers.fetch(tag=TAG)
            await asyncio.sleep(30)  # the donors let go of their snapshots
            gc.collect()
        assert names() == []
        assert 0 < open_files() - before <= 2 * 3  # of two archives, two rounds each and one to write to
    gc.collect()
    assert open_files() == before


@simulated
async def test_a_full_disk_costs_only_that_the_round_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Keepers() as keepers:
        events: list[Event] = []
        keepers.swarm.peers[0].endpoint.events.subscribe(events.append)

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(unnamed_file_module.UnnamedFile, "write_at", full)
            await keepers.round()
            await keepers.round()
        assert kept(keepers.archives[0]) == ()
        (notice,) = [event for event in events if isinstance(event, Noticed)]
        assert "No space left" in notice.text and "'test'" in notice.text
        result = await keepers.round()
        assert_is(await keepers.fetch(tag=TAG), result)


def hanging_disk(patch: pytest.MonkeyPatch) -> threading.Event:
    """A write hangs until it has been given up; sets the event when it does."""
    hanging, go_on = threading.Event(), threading.Event()
    write_at, give_up = unnamed_file_module.UnnamedFile.write_at, unnamed_file_module.UnnamedFile.give_up

    def given_up(file: unnamed_file_module.UnnamedFile) -> None:
        give_up(file)
        go_on.set()

    def slow(*args: Any) -> int:
        hanging.set()
        assert go_on.wait(60)
        return write_at(*args)

    patch.setattr(unnamed_file_module, "_WRITE", 1000)
    patch.setattr(unnamed_file_module.UnnamedFile, "write_at", slow)
    patch.setattr(unnamed_file_module.UnnamedFile, "give_up", given_up)
    return hanging


@in_real_time
async def test_a_disk_that_is_too_slow_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In real time."""
    result = await asyncio.to_thread(virtual_time.run, one_result())
    hanging = hanging_disk(monkeypatch)

    archive = RoundArchive(Endpoint(MemoryNetwork().transport(Identity.from_seed(1))), "test", directory=tmp_path)
    archive.options = ArchiveOptions(patience=0.01)
    archive.keep(bytes(32), TAG, result)
    await asyncio.to_thread(hanging.wait)
    await archive.written()
    assert kept(archive) == () and archive._told
    archive.options = ArchiveOptions(patience=60.0)
    archive.keep(bytes(32), TAG, result)  # to the same file, where something is written already
    await archive.written()
    assert kept(archive) == (bytes(32),) and not archive._spare
    await archive.close()


@in_real_time
async def test_the_end_does_not_wait_for_a_disk_that_is_too_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = await asyncio.to_thread(virtual_time.run, one_result())
    hanging = hanging_disk(monkeypatch)

    archive = RoundArchive(Endpoint(MemoryNetwork().transport(Identity.from_seed(1))), "test", directory=tmp_path)
    archive.keep(bytes(32), TAG, result)
    await asyncio.to_thread(hanging.wait)
    await archive.close()
    assert kept(archive) == ()


async def one_result() -> AllreduceResult:
    async with Keepers() as keepers:
        return await keepers.round()


@simulated
async def test_the_disk_is_not_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Keepers() as keepers:
        monkeypatch.setattr(unnamed_file_module, "_LEAVE_FREE", 1 << 60)
        await keepers.round()
        assert kept(keepers.archives[0]) == ()


@pytest.mark.parametrize("liars", [1, 2])
@simulated
async def test_false_averages_are_found_out_by_the_digest_that_the_group_committed(liars: int) -> None:
    async with Keepers() as keepers:
        result = await keepers.round()
        for archive in keepers.archives[:liars]:
            stored = archive._rounds[0]
            stored.file.write(40, memoryview(bytes(8)))
        events: list[Event] = []
        keepers.swarm.peers[-1].endpoint.events.subscribe(events.append)
        wanted = {"group_id": keepers.group.group_id, "plan": keepers.plan, "digest": result.digest}
        if liars == 1:
            assert_is(await keepers.fetch(**wanted), result)
        else:
            with pytest.raises(StateDownloadError, match="not what the digest"):
                await keepers.fetch(**wanted)
            refused = {event.peer for event in events if isinstance(event, PeerRefused)}
            assert refused == {peer.text for peer in keepers.donors}


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
async def test_closing_while_a_round_is_written_leaves_nothing() -> None:
    async with Keepers() as keepers:
        result = await keepers.round()
        archive = RoundArchive(keepers.swarm.peers[-1].endpoint, "other")
        archive.start()
        archive.keep(keepers.group.group_id, TAG, result)
        await archive.close()
        await archive.close()
        assert kept(archive) == () and not archive._spare
        assert replay_prefix("other") == "other.replays"


@simulated
async def test_kept_rounds_are_not_in_memory(tmp_path: Path) -> None:
    size = 32 << 20

    def anonymous() -> int:
        fields = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in fields if line.startswith(("RssAnon", "RssShmem"))) * 1024

    async with Keepers(2, directory=tmp_path) as keepers:
        result = await keepers.round()
        big = AllreduceResult(
            [torch.ones(size // 4)],
            result.contributors,
            result.weights,
            result.samples,
            {},
            result.digest,
            0,
            0,
            result.parts,
        )
        before = anonymous()
        for _ in range(4):
            keepers.archives[0].keep(keepers.group.group_id, TAG, big)
            await keepers.archives[0].written()
        snapshot = await keepers.archives[0]._provide(b"group " + keepers.group.group_id)
        assert snapshot is not None and float(snapshot.tensors["0"].sum()) == size // 4
        assert anonymous() - before < size // 8


@simulated
async def test_a_round_that_cannot_be_written_is_not_kept_in_memory_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with Keepers() as keepers:
        monkeypatch.setattr(unnamed_file_module.UnnamedFile, "write_at", full)
        result = await keepers.round()
        memory = weakref.ref(result.averages[0])
        gc.collect()
        gc.disable()
        try:
            keepers.archives[0].keep(keepers.group.group_id, TAG, result)
            del result
            await keepers.archives[0].written()
            assert memory() is None
        finally:
            gc.enable()
