"""Downloads of a state: from several donors, past those that die, lie or differ, all or nothing."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from swarmcli.errors import StateDownloadError
from swarmcli.events import PeerRefused
from swarmcli.network import Identity, PeerID, Stream
from swarmcli.state import snapshot as snapshot_module
from swarmcli.state.assembly import DownloadedState
from swarmcli.state.donor import Holder, InLine, StateRequest, state_method
from swarmcli.state.download import DownloadProgress
from swarmcli.state.snapshot import PinnedState, Snapshot, StateOutline
from tests.averaging.states import CHUNK, Swarm, check, drip, make_state, size_of
from tests.simulation import in_real_time, simulated
from tests.suites import soak

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.mark.parametrize("donors", [1, 6])
@simulated
async def test_a_whole_state_arrives(donors: int) -> None:
    async with Swarm(donors, bandwidth=200_000) as swarm:
        got = await swarm.download(version=b"v1")
        check(got, swarm.states[0])
        assert len(got.donors) == min(donors, 4)
        assert got.received == size_of(swarm.states[0])


@in_real_time
async def test_an_outline_is_read_and_checked_once_and_beside_the_loop() -> None:
    """A stranger's may name 262,144 tensors, which takes a second."""
    threads: list[int] = []
    async with Swarm(4) as swarm:
        check(await swarm.download(check=lambda outline: threads.append(threading.get_ident())), swarm.states[0])
    assert len(threads) == 1 and threads[0] != threading.get_ident()


def test_the_time_left_is_told_by_the_last_seconds_not_by_the_mean_since_the_start() -> None:
    seconds = 0.0
    progress = DownloadProgress(lambda: seconds)
    seconds = 40.0
    assert progress.sentence(None) == "downloading the state: no donor has answered for 40 s"
    progress.begin(3_000_000)
    assert progress.sentence(50_000.0) == "downloading the state: 3.0 MB at 50 kB/s, about 60 s"
    for speed in (100_000, 20_000):
        for _ in range(15):
            seconds += 1.0
            progress.note(progress.received + speed)
        left = (3_000_000 - progress.received) / speed
        assert progress.sentence(None).endswith(f" at {speed // 1000} kB/s, about {left:.0f} s left")


@pytest.mark.parametrize("direct", [0, 1, 2])
@simulated
async def test_donors_at_relays_are_asked_when_no_other_is_left(direct: int) -> None:
    async with Swarm(4) as swarm:
        for donor in swarm.ids[direct:2]:
            swarm.network.kill(donor)
        got = await swarm.download(donors=swarm.ids[:2], relayed=swarm.ids[2:])
        check(got, swarm.states[0])
        assert set(got.donors) == set(swarm.ids[:direct] or swarm.ids[2:])


@simulated
async def test_a_donor_killed_half_way_costs_less_than_a_twentieth() -> None:
    async with Swarm(2, bandwidth=500_000) as swarm:
        swarm.states = [Snapshot(b"v1", {"epoch": 3}, make_state(size=500_000))] * 2
        total = size_of(swarm.states[0])
        downloading = asyncio.create_task(swarm.download())
        newcomer = swarm.endpoints[-1]
        await asyncio.sleep(0.5 * total / 500_000 + 0.2)
        assert 0.3 * total < newcomer.statistics().traffic.received < 0.7 * total
        swarm.network.kill(swarm.ids[0])
        check(await downloading, swarm.states[0])
        assert newcomer.statistics().traffic.received < 1.05 * total


@pytest.mark.parametrize("donors", [1, 3])
@simulated
async def test_a_lying_donor_is_found_out(donors: int) -> None:
    async with Swarm(donors, bandwidth=200_000) as swarm:
        honest = PinnedState.chunk

        def lie(self: PinnedState, chunk: int) -> list[memoryview]:
            pieces = honest(self, chunk)
            lies = self.snapshot is swarm.states[0] and chunk >= 5 and hasattr(self, "manifest")
            return [memoryview(bytes(len(piece))) for piece in pieces] if lies else pieces

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PinnedState, "chunk", lie)
            if donors > 1:
                check(await swarm.download(), swarm.states[1])
            else:
                with pytest.raises(StateDownloadError, match="does not have the hash") as caught:
                    await swarm.download()
                assert list(caught.value.attempts) == [swarm.ids[0].text]
        refused = [event for event in swarm.events if isinstance(event, PeerRefused)]
        assert [event.peer for event in refused] == [swarm.ids[0].text] and refused[0].what == "state"


def a_bit_apart(*chunks: int) -> dict[str, torch.Tensor]:
    """The usual state but for the lowest bit of one number in each of these chunks."""
    state = make_state()
    for chunk in chunks:
        state["weight"].view(torch.int32).view(-1)[chunk * CHUNK // 4 + 7] ^= 1
    return state


@pytest.mark.parametrize(("chunks", "other"), [([0], 0), (range(0, 29, 2), 0), ([29], 1)])
@simulated
async def test_donors_that_differ_in_a_bit_are_not_mixed(chunks: Sequence[int], other: int) -> None:
    async with Swarm(3, bandwidth=100_000) as swarm:
        swarm.states[other] = Snapshot(b"v1", {"epoch": 3}, a_bit_apart(*chunks))
        got = await swarm.download()
        mine = [torch.equal(got.tensors["weight"], state.tensors["weight"]) for state in swarm.states]
        check(got, swarm.states[mine.index(True)])
        assert len(got.digests) == -(-size_of(swarm.states[0]) // CHUNK)
        assert not [event for event in swarm.events if isinstance(event, PeerRefused)], "that is no lie"


@simulated
async def test_of_two_that_differ_in_one_bit_the_second_is_taken_where_the_first_died() -> None:
    async with Swarm(2, bandwidth=20_000) as swarm:
        swarm.states[1] = Snapshot(b"v1", {"epoch": 3}, a_bit_apart(3))
        swarm.network.set_bandwidth(swarm.ids[1], 8_000)  # the first to answer is the other one
        downloading = asyncio.create_task(swarm.download())
        await asyncio.sleep(4)
        swarm.network.kill(swarm.ids[0])
        check(await downloading, swarm.states[1])


@simulated
async def test_the_only_donor_is_asked_once_more() -> None:
    async with Swarm(1, bandwidth=50_000) as swarm:
        downloading = asyncio.create_task(swarm.download())
        await asyncio.sleep(1.5)
        for channel in list(swarm.endpoints[0].peers.bulk()):
            channel.connection.abort("a cable was pulled")
        check(await downloading, swarm.states[0])
        assert swarm.endpoints[-1].statistics().traffic.received < 1.2 * size_of(swarm.states[0])


@simulated
async def test_only_the_wanted_version() -> None:
    async with Swarm(3) as swarm:
        swarm.states[0] = Snapshot(b"v0", None, make_state(seed=5))
        got = await swarm.download(version=b"v1")
        check(got, swarm.states[1])
        assert swarm.ids[0] not in got.donors
        with pytest.raises(StateDownloadError) as caught:
            await swarm.download(version=b"v9")
        assert set(caught.value.attempts) == {peer.text for peer in swarm.ids}
        assert "does not have that state" in str(caught.value)


@simulated
async def test_a_newcomer_that_a_donor_names_to_itself_does_not_ask_itself() -> None:
    async with Swarm(1) as swarm:
        donor, newcomer = swarm.endpoints
        swarm.donors[0].close()

        async def lie(peer: PeerID, request: StateRequest, stream: Stream) -> None:
            await stream.send(InLine((Holder(newcomer.peer_id, ("memory://elsewhere",)),)))

        donor.serve_stream(state_method("test"), StateRequest, lie)
        with pytest.raises(StateDownloadError) as caught:
            await swarm.download()
        assert list(caught.value.attempts) == [donor.peer_id.text]


@simulated
async def test_busy_donors_are_asked_until_time_is_up() -> None:
    async with Swarm(1, max_downloads=0) as swarm:
        with pytest.raises(StateDownloadError, match=r"came for 7 s.*others are downloading"):
            await swarm.download(timeout=7)
        assert asyncio.get_running_loop().time() == pytest.approx(7, abs=0.1)


@simulated
async def test_a_download_may_take_longer_than_its_donor_may_be_silent() -> None:
    """It takes as long as the lines need; a donor that gives nothing more is given up."""
    async with Swarm(1, bandwidth=50_000) as swarm:
        loop = asyncio.get_running_loop()
        check(await swarm.download(timeout=1), swarm.states[0])
        took = loop.time()
        assert took > 2
        progress = DownloadProgress(loop.time)
        download = asyncio.create_task(swarm.download(timeout=1, progress=progress))
        await asyncio.sleep(took / 2)
        swarm.network.set_bandwidths(swarm.ids[0], uplink=1, downlink=1)
        with pytest.raises(StateDownloadError, match=r"nothing of the state came for 1 s"):
            await download
        assert loop.time() == pytest.approx(progress.moved + 1, abs=0.1)


@simulated
async def test_nobody_to_ask_and_nobody_there() -> None:
    async with Swarm(1) as swarm:
        with pytest.raises(StateDownloadError, match="nobody to ask"):
            await swarm.download(donors=[])
        stranger = Identity.from_seed(99).peer_id
        with pytest.raises(StateDownloadError) as caught:
            await swarm.download(donors=[stranger])
        assert list(caught.value.attempts) == [stranger.text]
        check(await swarm.download(donors=[stranger, *swarm.ids]), swarm.states[0])


@simulated
async def test_an_outline_is_checked_before_anything_is_allocated() -> None:
    async with Swarm(1) as swarm:
        seen: list[StateOutline] = []

        def refuse(outline: StateOutline) -> None:
            seen.append(outline)
            raise ValueError("weight has another shape here")

        with pytest.raises(StateDownloadError, match="another shape here"):
            await swarm.download(check=refuse)
        assert seen[0].metadata == {"epoch": 3}
        assert seen[0].descriptors["weight"].shape == (300, 100)
        with pytest.raises(StateDownloadError, match="at most 1000 are accepted"):
            await swarm.download(max_bytes=1000)


@simulated
async def test_donations_are_reported_and_the_snapshot_is_let_go() -> None:
    donated: list[tuple[PeerID, bytes, int]] = []
    async with Swarm(1, donated=lambda peer, state, size: donated.append((peer, state.version, size))) as swarm:
        await swarm.download(version=b"v1")
        await asyncio.sleep(1)
        ((peer, version, size),) = donated
        assert peer == swarm.endpoints[1].peer_id and version == b"v1" and size >= size_of(swarm.states[0])
        await swarm.download(version=b"v1")
        assert swarm.provided == [1]
        await asyncio.sleep(10)
        await swarm.download(version=b"v1")
        assert swarm.provided == [2]


MANIFEST = 1 << 12  # bytes of a stream that are more than the manifest here, and less than a chunk with it


DRIPS = [(0, [0, 1], False), (MANIFEST, [3], False), (MANIFEST + 2 * CHUNK, [0, 1, 2], True)]
MORE_DRIPS = itertools.product([0, MANIFEST, MANIFEST + 2 * CHUNK], [[0], [3], [0, 1], [0, 1, 2]], [False, True])


@pytest.mark.parametrize(("quick", "dripping", "spooled"), [*DRIPS, *soak(MORE_DRIPS)])
@simulated
async def test_donors_that_drip_hold_up_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick: int, dripping: list[int], spooled: bool
) -> None:
    async with Swarm(4, bandwidth=100_000) as swarm:
        drip(monkeypatch, [swarm.ids[index] for index in dripping], quick)
        check(await swarm.download(spool=tmp_path if spooled else None), swarm.states[0])
        assert asyncio.get_running_loop().time() < 50
        assert not [event for event in swarm.events if isinstance(event, PeerRefused)], "slow is no lie"


@simulated
async def test_a_slow_liar_writes_over_nothing_that_another_one_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Swarm(2, bandwidth=100_000) as swarm:
        swarm.states[0] = Snapshot(b"v1", {"epoch": 3}, make_state())
        given, honest = itertools.count(), PinnedState.chunk

        def lie(self: PinnedState, chunk: int) -> list[memoryview]:
            pieces = honest(self, chunk)
            lies = self.snapshot is swarm.states[0] and hasattr(self, "manifest") and next(given) >= 7
            return [memoryview(b"\xff" * len(piece)) for piece in pieces] if lies else pieces

        monkeypatch.setattr(PinnedState, "chunk", lie)
        drip(monkeypatch, swarm.ids[:1], MANIFEST + 7 * CHUNK)
        swarm.donors[1]._courtesy = asyncio.Event().wait  # it takes its time: the other one would have some to write
        check(await swarm.download(), swarm.states[1])


@simulated
async def test_the_first_donor_drips_a_state_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Swarm(3, bandwidth=100_000) as swarm:
        swarm.states[0] = Snapshot(b"v1", {"epoch": 3}, a_bit_apart(*range(29)))
        for peer in swarm.ids[1:]:
            swarm.network.set_bandwidth(peer, 20_000)  # it comes first
        drip(monkeypatch, swarm.ids[:1], MANIFEST + 3 * CHUNK)
        check(await swarm.download(), swarm.states[1])
        assert asyncio.get_running_loop().time() < 50


@pytest.mark.parametrize("donors", [1, 4])
@simulated
async def test_donors_that_are_alike_slow_give_each_byte_once(monkeypatch: pytest.MonkeyPatch, donors: int) -> None:
    """A chunk takes 16 s."""
    monkeypatch.setattr(snapshot_module, "_MIN_CHUNK", 1 << 16)
    async with Swarm(donors) as swarm:
        swarm.states = [Snapshot(b"v1", {"epoch": 3}, make_state(size=100_000))] * donors
        for peer in swarm.ids:
            swarm.network.set_bandwidth(peer, 4_000)
        got = await swarm.download(timeout=3600)
        check(got, swarm.states[0])
        assert got.received == size_of(swarm.states[0]) and len(got.donors) == donors


DONORS, NEWCOMERS = 5, 3
SPEED = 100_000  # bytes per second of every link


def unlike(chance: random.Random) -> dict[str, torch.Tensor]:
    """The usual state with some bits flipped."""
    state = make_state()
    bits = state["weight"].view(torch.int32).view(-1)
    for _ in range(chance.randint(1, 5)):
        bits[chance.randrange(len(bits))] ^= 1
    return state


async def disturb(swarm: Swarm, chance: random.Random) -> None:
    """Faults at random times, to all donors but the last one, which stays sound."""
    for _ in range(chance.randint(1, 6)):
        await asyncio.sleep(chance.uniform(0, 1.5))
        victim = swarm.endpoints[chance.randrange(DONORS - 1)]
        match chance.choice(["kill", "freeze", "thaw", "pull a cable"]):
            case "kill":
                swarm.network.kill(victim.peer_id)
            case "freeze":
                swarm.network.freeze(victim.peer_id)
            case "thaw":
                swarm.network.thaw(victim.peer_id)
            case _:
                for channel in list(victim.peers.bulk()):
                    channel.connection.abort("a cable was pulled")


def is_one_of(got: DownloadedState, states: list[Snapshot]) -> bool:
    return any(all(torch.equal(got.tensors[name], state.tensors[name]) for name in got.tensors) for state in states)


@pytest.mark.parametrize("seed", range(60))
@simulated
async def test_what_comes_out_is_one_donors_state_and_it_comes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    honest = PinnedState.chunk
    liar = chance.randrange(DONORS - 1) if chance.random() < 0.5 else None
    async with Swarm(DONORS, NEWCOMERS, bandwidth=SPEED, max_downloads=2) as swarm:
        for index in range(DONORS):
            if chance.random() < 0.4:
                swarm.states[index] = Snapshot(b"v1", {"epoch": 3}, unlike(chance))

        def lie(self: PinnedState, chunk: int) -> list[memoryview]:
            pieces = honest(self, chunk)
            lies = liar is not None and self.snapshot is swarm.states[liar] and hasattr(self, "manifest")
            return [memoryview(bytes(len(piece))) for piece in pieces] if lies and chunk % 3 == 0 else pieces

        if liar is not None:
            state = swarm.states[liar]
            swarm.states[liar] = Snapshot(state.version, state.metadata, state.tensors)  # nobody else's
            monkeypatch.setattr(PinnedState, "chunk", lie)
        if chance.random() < 0.5:
            dripping = chance.sample(swarm.ids[:-1], chance.randint(1, DONORS - 1))
            drip(monkeypatch, dripping, chance.randrange(60_000))
        downloads = [asyncio.create_task(swarm.download(number, timeout=300)) for number in range(NEWCOMERS)]
        await disturb(swarm, chance)
        for got in await asyncio.gather(*downloads):
            assert is_one_of(got, swarm.states)
        refused = {event.peer for event in swarm.events if isinstance(event, PeerRefused) and event.what == "state"}
        assert refused <= ({swarm.ids[liar].text} if liar is not None else set())
        for endpoint in swarm.endpoints:
            swarm.network.thaw(endpoint.peer_id)
