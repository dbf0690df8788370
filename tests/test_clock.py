"""Swarm time: wrong clocks, jumping clocks, lying peers, and no drift from correcting corrections."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from swarmcli import clock as clock_module
from swarmcli.clock import MAX_OFFSET, MAX_PEERS, SETTLING, Clock, get_dht_time, set_default_clock
from swarmcli.network import Endpoint, Identity
from swarmcli.testing import MemoryNetwork, virtual_time
from swarmcli.testing.virtual_time import EPOCH
from tests.simulation import simulated

NAN, INF = float("nan"), float("inf")


class Machine:
    """A wall clock that is wrong, and a clock that nobody can set; both may tick fast or slow."""

    def __init__(self, wrong: float = 0.0, rate: float = 1.0) -> None:
        self.wrong, self.rate = wrong, rate
        self.true = 0.0
        self.clock = Clock(self.wall, self.unsettable)

    def unsettable(self) -> float:
        return self.true * self.rate

    def wall(self) -> float:
        return EPOCH + self.unsettable() + self.wrong

    @property
    def error(self) -> float:
        """How far its swarm time is from the true time."""
        return self.clock.now() - EPOCH - self.true


def exchange(asker: Machine, answerer: Machine, delay: float = 0.05, name: bytes = b"peer", **how: Any) -> None:
    """A call from one to the other, whose raw clocks are measured without time passing."""
    sent = asker.clock.raw()
    there = answerer.clock.raw() + delay / 2
    asker.clock.observe(name, sent, there, there, sent + delay, **how)


def pass_time(machines: list[Machine], seconds: float) -> None:
    for machine in machines:
        machine.true += seconds


def test_raw_is_the_local_clock_and_alone_it_is_swarm_time() -> None:
    machine = Machine(wrong=-600)
    assert machine.clock.raw() == machine.clock.now() == EPOCH - 600
    assert machine.clock.offset == 0


def test_the_first_correction_steps() -> None:
    machine = Machine(wrong=600)
    for name in (b"one", b"other"):
        exchange(machine, Machine(), name=name)
    assert machine.error == pytest.approx(0, abs=1e-3)


def test_later_ones_slew_and_time_never_runs_backwards() -> None:
    machine, others = Machine(), [Machine(wrong=-100) for _ in range(3)]
    exchange(machine, Machine(), name=b"early")
    pass_time([machine, *others], SETTLING + 1)
    latest = machine.clock.now()
    for number, other in enumerate(others):
        exchange(machine, other, name=b"late %d" % number)
    for _ in range(1000):
        pass_time([machine, *others], 1)
        assert latest <= machine.clock.now() < latest + 2
        latest = machine.clock.now()
    assert machine.error == pytest.approx(-100, abs=0.01)


def test_setting_the_machines_clock_moves_nothing() -> None:
    machine = Machine()
    assert machine.error == 0
    for wrong in (3600, -3600, 0):
        machine.wrong = wrong
        pass_time([machine], 10)
        assert machine.error == 0


@pytest.mark.parametrize("count", [1, 4])
def test_a_minority_of_liars_cannot_pull_beyond_honest_clocks(count: int) -> None:
    machine = Machine(wrong=1)
    for number in range(count + 1):
        exchange(machine, Machine(wrong=number / 10), name=b"honest %d" % number)
    for number in range(count):
        exchange(machine, Machine(wrong=(-1) ** number * 50_000), name=b"liar %d" % number)
        assert -0.01 <= machine.error <= 1.01


def test_impossible_measurements_are_ignored() -> None:
    clock = Machine().clock
    now = clock.raw()
    for times in [
        (now, NAN, now, now),
        (now, now, NAN, now),
        (now, -INF, INF, now),
        (now, now, now + 50, now + 1),  # answered later than it came back
        (now, now, now, now + 60),  # too slow to mean anything
        (now, now + 2 * MAX_OFFSET, now + 2 * MAX_OFFSET, now),
    ]:
        clock.observe(b"liar", *times)
    assert clock.now() == now


def test_a_clock_that_is_further_off_than_is_corrected_is_told_by_most_of_those_that_were_dialed() -> None:
    machine = Machine()
    ahead, right = Machine(wrong=7200.0), Machine()

    def ask(name: bytes, other: Machine, **how: Any) -> None:
        exchange(machine, other, 0.0, name, **how)

    ask(b"came by itself", ahead, dialed=False)
    assert machine.clock.uncorrected == 0.0
    ask(b"one", ahead)
    assert machine.clock.uncorrected == pytest.approx(7200.0) and machine.clock.offset == 0.0
    ask(b"another", right)
    assert machine.clock.uncorrected == 0.0
    ask(b"one", right)
    ask(b"third", ahead)
    assert machine.clock.uncorrected == 0.0


def test_those_whom_we_dialed_in_one_network_are_one_voice() -> None:
    """Even if these are all honest peers of a small swarm: whoever has many keys can make others dial them."""
    for wrong in (3500, 7200):
        machine = Machine()
        for number in range(3):
            exchange(machine, Machine(), 0.0, b"honest %d" % number, network=f"5.{number}.0.0/24")
        for number in range(12):
            exchange(machine, Machine(wrong=wrong), 0.0, b"liar %d" % number, network=f"6.{number % 2}.0.0/24")
        assert machine.error == pytest.approx(0, abs=0.01) and machine.clock.uncorrected == 0.0


def test_those_whom_we_dialed_in_our_own_network_have_a_voice_each() -> None:
    machine = Machine()
    for number in range(3):
        exchange(machine, Machine(), 0.0, b"next door %d" % number, network="192.168.1.0/24", shared=True)
    for number in range(3):
        exchange(machine, Machine(wrong=3500), 0.0, b"liar %d" % number, network=f"6.{number}.0.0/24")
    assert machine.error == pytest.approx(0, abs=0.01)


def test_the_fastest_exchange_counts_most() -> None:
    """A call that took a second says little: if only the way there was slow, its offset is wrong by half a second."""
    machine, other = Machine(), Machine(wrong=10)
    exchange(machine, other, delay=0.01)
    sent = machine.clock.raw()
    machine.clock.observe(b"peer", sent, sent + 11, sent + 11, sent + 1)
    assert machine.clock.offset == pytest.approx(5), "the median of this peer and the other"


def test_peers_are_forgotten_the_least_recently_measured_first() -> None:
    machine = Machine()
    for number in range(MAX_PEERS):
        exchange(machine, Machine(wrong=100), name=b"early %d" % number)
    assert machine.clock.offset == pytest.approx(100)
    for number in range(MAX_PEERS // 2 + 1):
        exchange(machine, Machine(), name=b"late %d" % number)
    assert machine.clock.offset == pytest.approx(0, abs=1e-3), "as many of the first have gone as came later"


def test_corrections_do_not_drift_over_a_day() -> None:
    """Clocks tick up to 100 ppm apart, and everyone corrects by everyone for a day: they stay within the span of
    the uncorrected ones, and close to each other."""
    chance = random.Random(5)
    machines = [Machine(wrong=chance.gauss(0, 1), rate=1 + chance.uniform(-1e-4, 1e-4)) for _ in range(9)]
    for _ in range(24 * 60):
        for asker in machines:
            number = chance.randrange(9)
            if machines[number] is not asker:
                exchange(asker, machines[number], delay=chance.uniform(0.01, 0.2), name=b"%d" % number)
            asker.clock.now()
        pass_time(machines, 60)
    raw = [machine.clock.raw() - EPOCH - machine.true for machine in machines]
    errors = [machine.error for machine in machines]
    assert min(raw) <= min(errors) and max(errors) <= max(raw)
    assert max(errors) - min(errors) < 0.25


# Over the network


@simulated
async def test_pings_alone_keep_clocks_together() -> None:
    loop = asyncio.get_running_loop()
    network = MemoryNetwork()
    a = Endpoint(network.transport(Identity.from_seed(1)))
    b = Endpoint(network.transport(Identity.from_seed(2)), clock=Clock(lambda: EPOCH + loop.time() + 600))
    for peer in (a, b):
        await peer.start()
    await a.connect(b.addresses[0], timeout=5)
    await asyncio.sleep(30)
    assert a.clock.offset == pytest.approx(300, abs=0.01)
    await asyncio.sleep(100)
    assert [peer.clock.now() - EPOCH - loop.time() for peer in (a, b)] == pytest.approx([300, 300], abs=0.01)
    await a.close()
    await b.close()


# The process's own clock


def test_get_dht_time_follows_the_default_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "_default", Clock())
    set_default_clock(Machine(wrong=5).clock)
    assert get_dht_time() == EPOCH + 5


def test_a_clock_without_arguments_takes_virtual_time_in_there() -> None:
    async def main() -> float:
        clock = Clock()
        await asyncio.sleep(100)
        return clock.now()

    assert virtual_time.run(main()) == EPOCH + 100
    assert abs(Clock().now() - EPOCH) > 1e6  # and the machine's out here
