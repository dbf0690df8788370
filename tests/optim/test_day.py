"""A day of a run whose volunteers come and go, sleep and lend little: nothing grows, is lost or stands still."""

from __future__ import annotations

import asyncio
import gc
import math
import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from swarmcli.dht import DHTNode
from swarmcli.events import EpochAdvanced, EpochCredited, Event
from swarmcli.journal import Journal, RunRecord
from swarmcli.network.identity import PeerID
from swarmcli.optim.config import Role
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, make_node
from tests.optim.unlike import LOOK, Allowance, Clock, Unlike, latencies, now_and_then
from tests.simulation import now
from tests.suites import soak

HOUR = 3600.0
PACES = (1.0, 2.0, 4.0)  # samples per second of the trainers that stay; the last one is on a laptop
GUEST = 2.0  # samples per second of those who come, train for a while, and leave or are killed
GUESTS = (100, 101)  # who they are
TARGET = 210  # samples: half a minute of those who stay
STAYS, AWAY = (300.0, 2400.0), (30.0, 1200.0)  # seconds of a guest
AWAKE, ASLEEP = (1800.0, 7200.0), (60.0, 7200.0)  # seconds of a laptop
CHANGES = 300.0  # seconds between two changes of what somebody lends
BACK = 600.0  # seconds until everybody is in step once nothing happens any more
KEPT = 0.7  # of what somebody computes under limits that change every few minutes: a line of 10 kB/s gives up a quarter
WARM = 3  # hours until caches, books and pools are as full as they get
GROWTH = 1.2  # of what is held in the last hours, beside the hours after these
JOURNAL = 10_000_000  # bytes: the least that a journal can be held to


class Books:
    """What each round took of each peer, as the round's members tell it."""

    def __init__(self) -> None:
        self.samples: dict[str, int] = {}  # by lineage
        self.credited: dict[str, dict[str, float]] = {}
        self.handed_in: dict[str, Counter[str]] = defaultdict(Counter)

    def listen(self, node: DHTNode) -> None:
        last: list[EpochAdvanced] = []

        def hear(event: Event) -> None:
            if isinstance(event, EpochAdvanced) and event.samples:
                last[:] = [event]
                assert self.samples.setdefault(event.lineage, event.samples) == event.samples
                self.handed_in[event.lineage][node.peer_id.text] += event.own_samples
            # Whoever catches up tells what others' rounds have counted before it tells where it has come to.
            elif isinstance(event, EpochCredited) and last and last[0].epoch == event.epoch:
                credited = dict(event.samples)
                assert self.credited.setdefault(last[0].lineage, credited) == credited

        node.endpoint.events.subscribe(hear)

    def check(self) -> None:
        uncredited = self.samples.keys() - self.credited.keys()  # who replayed them has told, and the others are gone
        assert len(uncredited) < 0.02 * len(self.samples)
        for lineage, credited in self.credited.items():
            samples = self.samples[lineage]
            assert math.isclose(math.fsum(credited.values()), samples, abs_tol=1.0)
            for peer, given in self.handed_in[lineage].items():
                assert credited.get(peer, 0) <= given, "nobody is credited with what it did not hand in"
                assert len(credited) > 3 or credited.get(peer, 0) == given, "of up to three each counts in full"

    def accepted(self, peer: str) -> int:
        return sum(each[peer] for each in self.handed_in.values())


class Held:
    """What all peers together hold, hour by hour."""

    def __init__(self, journals: list[Journal]) -> None:
        self.journals = journals
        self.hours: dict[str, list[int]] = defaultdict(list)
        self.hour = 0

    def look(self, everyone: list[Unlike]) -> None:
        self.hour += 1
        assert all(journal.flush(60) for journal in self.journals)
        gc.collect()
        for what, count in {
            "objects": len(gc.get_objects()),
            "tasks": len(asyncio.all_tasks()),
            "timers": len(asyncio.get_running_loop()._scheduled),  # type: ignore[attr-defined]
            "connections": sum(len(each.node.endpoint.connected()) for each in everyone),
            "files": len(list(Path("/proc/self/fd").iterdir())),
        }.items():
            self.hours[what].append(count)
        assert max(journal.path.stat().st_size for journal in self.journals) < 1.1 * JOURNAL

    def grown(self) -> dict[str, list[int]]:
        """What there is more of at the end than when the run had been under way for some hours."""
        return {
            what: counts
            for what, counts in self.hours.items()
            if max(counts[-WARM:]) > GROWTH * max(counts[WARM : 2 * WARM])
        }


class Life:
    """The volunteers of the run, and whoever is there at the moment."""

    def __init__(self, swarm: Swarm, directory: Path, drawn: random.Random) -> None:
        self.swarm, self.directory, self.drawn = swarm, directory, drawn
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_time.VirtualTimeLoop)
        self.wall_time = loop.wall_time  # asked for by threads of the journals, too
        self.books = Books()
        self.journals: list[Journal] = []
        self.everyone: list[Unlike] = []
        self.computed: Counter[str] = Counter()
        self.strikes: Counter[str] = Counter()

    async def enter(self, node: DHTNode, role: Role, pace: float) -> Unlike:
        journal = self._journal(node, role)
        journal.listen(node.endpoint.events)
        self.books.listen(node)
        peer = Unlike(node, role, TARGET, pace)
        self.everyone.append(peer)
        await peer.core.start()
        return peer

    def _journal(self, node: DHTNode, role: Role) -> Journal:
        record = RunRecord("run", role, node.peer_id.text)
        path = self.directory / f"{node.peer_id.short}.sqlite"
        journal = Journal(path, run=record, clock=self.wall_time, size=JOURNAL)
        self.journals.append(journal)
        return journal

    async def guest(self, number: int) -> None:
        """Comes, trains and leaves or is killed, again and again."""
        while True:
            await asyncio.sleep(self.drawn.uniform(*AWAY))
            node = await make_node(self.swarm.network, number, self.swarm.contact)
            peer = await self.enter(node, "trainer", GUEST)
            running = asyncio.create_task(peer.run())
            try:
                await asyncio.sleep(self.drawn.uniform(*STAYS))
            finally:
                killed = self.drawn.random() < 0.5
                self.strikes["killed" if killed else "left"] += 1
                if killed:
                    self.swarm.network.kill(node.peer_id)
                running.cancel()
                await asyncio.wait([running])
                self.computed[node.peer_id.text] += peer.computed
                self.everyone.remove(peer)
                await peer.core.shutdown()
                await node.shutdown()
                self.journals.pop(self._index(node.peer_id)).close()

    def _index(self, peer: PeerID) -> int:
        return next(n for n, journal in enumerate(self.journals) if journal.run.peer == peer.text)

    async def sleep_now_and_then(self, laptop: Unlike) -> None:
        while True:
            await asyncio.sleep(self.drawn.uniform(*AWAKE))
            self.swarm.network.freeze(laptop.node.peer_id)
            laptop.frozen = True
            self.strikes["asleep"] += 1
            await asyncio.sleep(self.drawn.uniform(*ASLEEP))
            self.wake(laptop)

    def wake(self, laptop: Unlike) -> None:
        self.swarm.network.thaw(laptop.node.peer_id)
        laptop.frozen = False

    def check_kept(self, peer: Unlike) -> None:
        """Nearly all that a trainer computed went into rounds. It told of the rest and threw it away: a slow line could
        not send it, or the trainer slept for so long that its gradients were old."""
        accepted = self.books.accepted(peer.node.peer_id.text)
        assert accepted <= peer.computed
        assert accepted > KEPT * peer.computed, f"{peer.name}: {accepted} of {peer.computed} samples are in the run"


@pytest.mark.timeout(5400)
@pytest.mark.parametrize("hours", [pytest.param(0.25, marks=pytest.mark.e2e), *soak([8, 24])])
def test_a_day(hours: float, tmp_path: Path) -> None:
    drawn = random.Random(7)

    async def main() -> None:
        async with Swarm(7, latency=latencies(drawn)) as swarm:
            life = Life(swarm, tmp_path, drawn)
            helpers: list[tuple[Role, bool]] = [("monitor", False), ("auxiliary", True)]
            stays = [await life.enter(await swarm.node(client_mode=client), role, 0) for role, client in helpers]
            stays += [await life.enter(await swarm.node(), "trainer", pace) for pace in PACES]
            held, clock = Held(life.journals), Clock(life.everyone, TARGET, Allowance(seconds=30.0, first=60.0))
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(peer.run(), name=peer.name) for peer in stays]
                happening = [tasks.create_task(life.guest(number)) for number in GUESTS]
                happening.append(tasks.create_task(life.sleep_now_and_then(stays[-1])))
                happening.append(tasks.create_task(now_and_then(stays, drawn, CHANGES, hours * HOUR)))
                while now() < hours * HOUR:
                    await asyncio.sleep(LOOK)
                    clock.look(LOOK)
                    assert clock.passed <= 1, clock.verdict
                    if now() >= (held.hour + 1) * HOUR:
                        swarm.network.dials.clear()
                        held.look(life.everyone)
                for task in happening:
                    task.cancel()
                await asyncio.wait(happening)
                life.wake(stays[-1])
                for peer in stays:
                    peer.limit(None, None)
                    peer.pause(False)
                calm, ends_at = clock.epoch + 3, now() + BACK
                while min(peer.epoch for peer in stays) < calm:
                    await asyncio.sleep(LOOK)
                    assert now() < ends_at, f"somebody does not come back: {clock.verdict}"
                for peer in stays:
                    peer.ends = True
                await asyncio.wait(running)
            print(f"{clock.epochs} epochs, {clock.longest:.2f} of the allowance; {life.strikes}; {dict(held.hours)}")
            life.books.check()
            for peer in stays[2:]:
                life.check_kept(peer)
            for journal in life.journals:
                journal.close()
            for peer in stays:
                await peer.core.shutdown()
            if held.hour >= 2 * WARM:
                assert not held.grown(), held.hours

    virtual_time.run(main(), timeout=2 * hours * HOUR)
