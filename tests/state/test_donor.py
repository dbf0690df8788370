"""A donor with many newcomers: their turns, other holders of the state that it names, and its own work first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress

import pytest

from swarmcli.errors import CallRefused, StateDownloadError
from swarmcli.network import Endpoint
from swarmcli.state import donor as donor_module
from swarmcli.state import pins
from swarmcli.state.assembly import DownloadedState
from swarmcli.state.donor import StateDonor
from swarmcli.state.download import download_state
from swarmcli.state.snapshot import Snapshot
from swarmcli.state.witnesses import RootAnswer, RootQuestion, root_method
from tests.averaging.states import Swarm, check, make_state, size_of, trickle
from tests.simulation import simulated
from tests.suites import soak

pytestmark = pytest.mark.usefixtures("small_chunks")


SPEED = 1_000_000  # bytes per second of every link


class Newcomers(Swarm):
    """Newcomers that hand on what they have downloaded."""

    def __init__(self, donors: int, newcomers: int, size: int, **options: object) -> None:
        super().__init__(donors, newcomers, bandwidth=SPEED, **options)
        state = Snapshot(b"v1", {"epoch": 3}, make_state(size=size))
        self.states = [state] * donors
        self.total = size_of(state)
        self.finished: list[float] = []
        self.active = self.most_active = 0
        self.lenders = [StateDonor(endpoint, "test", self._nothing) for endpoint in self.endpoints[donors:]]

    async def _nothing(self, version: bytes) -> Snapshot | None:
        return None

    async def arrive(self, newcomer: int, timeout: float = 600.0) -> DownloadedState:
        endpoint, lender = self.endpoints[len(self.donors) + newcomer], self.lenders[newcomer]
        lender.start()
        with lender.expecting(b"v1") as lend:
            state = await download_state(endpoint, "test", self.ids, version=b"v1", timeout=timeout)
            lend(state.snapshot(), state.root)
        self.finished.append(asyncio.get_running_loop().time())
        check(state, self.states[0])
        return state


@pytest.mark.parametrize("donors", [2, *soak([1])])
@simulated
async def test_sixteen_newcomers_at_once(donors: int) -> None:
    """With links of speed B and a state of S bytes, D donors alone need 16 S / D B for all of them.

    The first four at each share its link, for 4 S / B. Then 5 D peers hold the state, and the others need as long as
    these take to send it, or as their own links take for it; twice that is allowed.
    """
    async with Newcomers(donors, 16, 200_000) as swarm:
        everyone = await asyncio.gather(*(swarm.arrive(newcomer) for newcomer in range(16)))
        alone = swarm.total / SPEED
        then = max(1.0, (16 - 4 * donors) / (5 * donors))
        assert max(swarm.finished) < (4 + 2 * then) * alone
        sent = [endpoint.statistics().traffic.sent for endpoint in swarm.endpoints]
        assert max(sent[:donors]) < 0.75 * 16 * swarm.total / donors, "the others gave as well"
        assert sum(state.received for state in everyone) < 1.05 * 16 * swarm.total
        helpers = {peer for state in everyone for peer in state.donors} - set(swarm.ids)
        assert len(helpers) >= 4


@simulated
async def test_a_donor_serves_a_few_at_a_time_in_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_module, "MAX_NAMED", 1)
    async with Newcomers(1, 6, 200_000, max_downloads=2) as swarm:
        order: list[int] = []

        async def come(number: int) -> None:
            await asyncio.sleep(0.01 * number)
            endpoint = swarm.endpoints[1 + number]
            await download_state(endpoint, "test", swarm.ids, version=b"v1", timeout=60)
            order.append(number)

        coming = [asyncio.create_task(come(number)) for number in range(6)]
        await asyncio.gather(*coming)
        assert [sorted(order[pair : pair + 2]) for pair in (0, 2, 4)] == [[0, 1], [2, 3], [4, 5]]


@simulated
async def test_a_newcomer_that_leaves_frees_its_place_in_line_and_its_snapshot() -> None:
    async with Newcomers(1, 3, 500_000, max_downloads=1) as swarm:
        first, second, third = (asyncio.create_task(swarm.arrive(number)) for number in range(3))
        await asyncio.sleep(0.5)
        second.cancel()
        await asyncio.sleep(0.1)
        first.cancel()
        await third
        assert asyncio.get_running_loop().time() < 1 + 1.2 * swarm.total / SPEED, "it had the link for itself"
        assert swarm.provided == [1]
        await asyncio.sleep(pins.LINGER + 1)
        await swarm.download()
        assert swarm.provided == [2], "the first one had been let go"
        for left in (first, second):
            with suppress(asyncio.CancelledError):
                await left


@simulated
async def test_a_donor_does_its_own_work_first() -> None:
    working = asyncio.Event()  # set: not working
    async with Newcomers(1, 1, 200_000, courtesy=working.wait) as swarm:
        coming = asyncio.create_task(swarm.arrive(0))
        await asyncio.sleep(11)
        given = swarm.endpoints[0].statistics().traffic.sent
        assert 4096 < given < 10 * 4096, "no more than a chunk now and then"
        working.set()
        await coming
        assert asyncio.get_running_loop().time() < 11 + 2 + 2 * swarm.total / SPEED


class Versions(Newcomers):
    """One donor that has a state of any version, and peers that take next to nothing. The last newcomer is honest."""

    asked: set[bytes]

    async def __aenter__(self) -> Versions:
        await super().__aenter__()
        self.asked = set()
        self.donors[0].close()
        self.donors[0] = StateDonor(self.endpoints[0], "test", self.version)
        self.donors[0].start()
        return self

    async def version(self, version: bytes) -> Snapshot:
        self.asked.add(version)
        return Snapshot(version, {"epoch": 3}, make_state(seed=version[0], size=100_000))

    async def fetch(self, timeout: float = 120.0, version: bytes = b"v") -> float:
        """Returns after how many seconds the honest one has its state."""
        began = asyncio.get_running_loop().time()
        state = await download_state(self.endpoints[-1], "test", self.ids, version=version, timeout=timeout)
        check(state, await self.version(version))
        return asyncio.get_running_loop().time() - began

    @asynccontextmanager
    async def trickling(self, versions: list[bytes], pause: float = 50.0) -> AsyncIterator[None]:
        """Meanwhile each of the other keys downloads a version, and comes again when it has to give way."""

        async def stay(endpoint: Endpoint, version: bytes) -> None:
            while True:
                with suppress(CallRefused):
                    await trickle(endpoint, self.ids[0], version, pause=pause)
                await asyncio.sleep(0.5)

        async with asyncio.TaskGroup() as tasks:
            pairs = zip(self.endpoints[1:], versions, strict=False)
            staying = [tasks.create_task(stay(endpoint, version)) for endpoint, version in pairs]
            await asyncio.sleep(1)
            yield
            for task in staying:
                task.cancel()


@simulated
async def test_two_versions_are_downloaded_at_once_and_the_third_one_waits() -> None:
    async with Versions(1, 3, 1) as swarm:
        coming = [
            asyncio.create_task(download_state(endpoint, "test", swarm.ids, version=version, timeout=60))
            for endpoint, version in zip(swarm.endpoints[1:], (b"a", b"b", b"c"), strict=True)
        ]
        await asyncio.sleep(0.2)
        assert len(swarm.asked) == 2
        assert [state.version for state in await asyncio.gather(*coming)] == [b"a", b"b", b"c"]


@simulated
async def test_a_state_that_takes_minutes_to_copy_and_hash_is_waited_for() -> None:
    async with Newcomers(1, 1, 50_000) as swarm:
        provide = swarm.donors[0]._pins._provide

        async def slowly(version: bytes) -> Snapshot | None:
            await asyncio.sleep(150.0)
            return await provide(version)

        swarm.donors[0]._pins._provide = slowly
        check(await swarm.download(timeout=300), swarm.states[0])
        assert swarm.provided == [1]


@simulated
async def test_keys_that_trickle_keep_nobody_out() -> None:
    """Four peers have all four places, or two both versions, and ask for one chunk in 50 s."""
    for versions in ([b"v"] * 4, [b"a", b"b"]):
        async with Versions(1, len(versions) + 1, 1) as swarm, swarm.trickling(versions):
            assert await swarm.fetch() < 25


@simulated
async def test_one_network_takes_all_places_only_while_no_other_wants_one() -> None:
    """A laboratory, or a stranger with many keys, that takes as much as it can; somebody from elsewhere waits."""
    hosts = [f"8.8.8.{number}" for number in range(12)] + ["9.9.9.9"]
    for versions in ([b"v"] * 12, [b"a", b"b"]):
        async with Versions(1, 13, 1, hosts=hosts) as swarm, swarm.trickling(versions, pause=0.1):
            assert await swarm.fetch() < 25


@simulated
async def test_one_network_does_not_fill_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_module, "MOST_IN_LINE", 4)
    hosts = [f"8.8.8.{number}" for number in range(10)] + ["9.9.9.9"]
    async with Versions(1, 11, 1, hosts=hosts) as swarm, swarm.trickling([b"v"] * 10):
        assert await swarm.fetch() < 25


@simulated
async def test_slow_links_and_short_sleeps_give_no_place_away() -> None:
    """A quarter of 10 kB/s, as of a newcomer with four donors, and four seconds of silence, while others wait."""
    async with Versions(1, 9, 1) as swarm:
        newcomer, size = swarm.endpoints[-1].peer_id, size_of(await swarm.version(b"v"))
        swarm.network.set_bandwidth(newcomer, 2500)
        fetching = asyncio.create_task(swarm.fetch(timeout=300))
        await asyncio.sleep(1)
        async with swarm.trickling([b"v"] * 8):
            await asyncio.sleep(10)
            swarm.network.freeze(newcomer)
            await asyncio.sleep(4)
            swarm.network.thaw(newcomer)
            assert await fetching < 4 + 1.2 * size / 2500, "it was never sent away"


@simulated
async def test_downloads_that_trickle_do_not_keep_a_donor_from_bearing_witness() -> None:
    async with Versions(1, 3, 1) as swarm, swarm.trickling([b"a", b"b"], pause=1.0):
        question = RootQuestion(b"v")
        answer = await swarm.endpoints[-1].call(swarm.ids[0], root_method("test"), question, RootAnswer, timeout=5)
        assert len(answer.root) == 32


@simulated
async def test_what_a_newcomer_expects_is_waited_for_and_refused_if_it_does_not_come() -> None:
    async with Newcomers(1, 2, 100_000) as swarm:
        lender = swarm.lenders[0]
        lender.start()
        asking = asyncio.create_task(
            download_state(swarm.endpoints[2], "test", [swarm.endpoints[1].peer_id], version=b"v1", timeout=30)
        )
        with lender.expecting(b"v1"):
            await asyncio.sleep(5)
            assert not asking.done()
        with pytest.raises(StateDownloadError, match="does not have that state"):
            await asking


@simulated
async def test_two_downloads_of_one_state_may_overlap() -> None:
    async with Newcomers(1, 2, 100_000) as swarm:
        lender, second = swarm.lenders[0], ExitStack()
        lender.start()
        asking = asyncio.create_task(
            download_state(swarm.endpoints[2], "test", [swarm.endpoints[1].peer_id], version=b"v1", timeout=30)
        )
        with second:
            with lender.expecting(b"v1"):
                await asyncio.sleep(1)
                lend = second.enter_context(lender.expecting(b"v1"))
            await asyncio.sleep(5)
            assert not asking.done()
            state = await download_state(swarm.endpoints[1], "test", swarm.ids, version=b"v1", timeout=30)
            lend(state.snapshot(), state.root)
        check(await asking, swarm.states[0])
