"""Many members fail at once, or the user's patience is short: the others soon know what became of the round."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions, Trust
from swarmcli.errors import RoundFailed, RoundUndecided
from swarmcli.testing import virtual_time
from tests.averaging.rounds import Kind, Outcome, Swarm
from tests.simulation import now

BANDWIDTH = 20_000.0  # bytes per second: a round takes about a second


def after(
    fault: str, dead: Sequence[int], when: float, kinds: list[Kind], options: AllreduceOptions
) -> tuple[list[Outcome], float]:
    """The outcomes of the others, and the seconds from the fault until the last of them was known."""

    async def main() -> tuple[list[Outcome], float]:
        async with Swarm(kinds, bandwidth=BANDWIDTH, options=options) as swarm:
            took: list[float] = []

            async def strike() -> None:
                await asyncio.sleep(when)
                began = now()
                for index in dead:
                    swarm.kill(index) if fault == "kill" else swarm.tasks[index].cancel()
                await asyncio.wait([task for index, task in enumerate(swarm.tasks) if index not in dead])
                took.append(now() - began)

            outcomes = await swarm.round(strike)
            swarm.check(outcomes)
            return [outcome for outcome in outcomes if outcome is not None], took[0]

    return virtual_time.run(main(), timeout=2000)


DEATHS: list[tuple[int, tuple[int, ...], Trust, float, type]] = [
    (4, (0, 3), "members", 0.1, RoundFailed),
    (4, (0, 3), "strangers", 0.1, RoundUndecided),
    (5, (0, 4), "strangers", 0.6, RoundFailed),
    (5, (3, 4), "members", 0.6, RoundFailed),
    (7, (4, 5, 6), "strangers", 0.1, RoundUndecided),
    (8, (5, 6, 7), "strangers", 0.1, RoundFailed),
    (8, (6, 7), "strangers", 0.1, RoundFailed),
]


@pytest.mark.parametrize(("size", "dead", "trust", "when", "ends"), DEATHS)
def test_survivors_soon_know_that_a_round_has_failed_or_that_nobody_can_tell(
    size: int, dead: tuple[int, ...], trust: Trust, when: float, ends: type
) -> None:
    """All of them reduce: with one that dies in mid-round it is lost. More than f dead of n prove nothing."""
    options = AllreduceOptions(part_size_bytes=512, trust=trust)
    outcomes, took = after("kill", dead, when, [Kind() for _ in range(size)], options)
    assert [type(outcome) for outcome in outcomes] == [ends] * (size - len(dead))
    assert took < 10  # connections that were still on their way when the round began get five seconds


@pytest.mark.parametrize(("size", "trust", "ends"), [(8, "strangers", RoundResult), (5, "members", RoundResult)])
def test_as_many_senders_as_a_quorum_can_spare_may_die(size: int, trust: Trust, ends: type) -> None:
    dead = (6, 7) if trust == "strangers" else (3, 4)
    kinds = [Kind(bandwidth=0.0 if index in dead else 1.0) for index in range(size)]
    outcomes, took = after("kill", dead, 0.6, kinds, AllreduceOptions(part_size_bytes=512, trust=trust))
    assert [type(outcome) for outcome in outcomes] == [RoundResult] * (size - len(dead))
    assert took < 5


# Two messages, each behind a packet of four other connections, take 0.58 s at this bandwidth: no less can be asked for.
@pytest.mark.parametrize("fault", ["kill", "leave"])
def test_one_that_fails_before_the_round_is_done_without_also_where_patience_is_short(fault: str) -> None:
    options = AllreduceOptions(part_size_bytes=512, sender_timeout=0.7)
    outcomes, took = after(fault, [4], 0.0, [*[Kind(delay=0.2)] * 4, Kind(delay=0.2, bandwidth=0.0)], options)
    for outcome in outcomes:
        assert isinstance(outcome, RoundResult) and len(outcome.contributors) == 4
    assert took < 8


@pytest.mark.parametrize("trust", ["strangers", "members"])
def test_a_round_in_which_everybody_was_left_out_is_none(trust: Trust) -> None:
    """Members begin later than anybody's patience: the group tries again, since by then they are there."""
    options = AllreduceOptions(part_size_bytes=512, trust=trust, sender_timeout=0.5)
    outcomes, _ = after("leave", [], 0.0, [Kind(delay=delay) for delay in (0, 0.6, 1.2, 1.8, 2.4)], options)
    for outcome in outcomes:
        assert isinstance(outcome, RoundFailed) or (isinstance(outcome, RoundResult) and outcome.contributors)
