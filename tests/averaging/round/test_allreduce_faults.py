"""Members die, freeze and are cut off at random moments of a round; whoever commits has the same bits."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions, Trust
from swarmcli.errors import RoundFailed, RoundUndecided
from swarmcli.testing import virtual_time
from tests.averaging.rounds import Kind, Outcome, Swarm
from tests.simulation import now, within

BANDWIDTH = 20_000.0  # bytes per second: a round takes about a second, and events fall into all of its phases


def disturbed(
    kinds: list[Kind],
    when: float,
    what: str,
    victims: Sequence[int],
    *,
    trust: Trust = "strangers",
    patience: float | None = None,
) -> tuple[Swarm, list[Outcome | None], float]:
    """Runs one round with one fault. Returns the others' outcomes, and the seconds from the fault to the last one."""

    async def main() -> tuple[Swarm, list[Outcome | None], float]:
        options = AllreduceOptions(part_size_bytes=512, trust=trust, sender_timeout=patience)
        async with Swarm(kinds, bandwidth=BANDWIDTH, options=options) as swarm:
            took: list[float] = []

            async def fault() -> None:
                await asyncio.sleep(when)
                began = now()
                for index in victims:
                    match what:
                        case "kill":
                            swarm.kill(index)
                        case "freeze":
                            swarm.freeze(index)
                        case _:
                            swarm.tasks[index].cancel()
                await asyncio.wait([task for index, task in enumerate(swarm.tasks) if index not in victims])
                took.append(now() - began)
                for index in victims:
                    swarm.network.thaw(swarm.peers[index].peer_id)

            outcomes = await swarm.round(fault)
            swarm.check(outcomes)
            return swarm, [each for index, each in enumerate(outcomes) if index not in victims], took[0]

    return virtual_time.run(main(), timeout=2000)


@pytest.mark.parametrize("what", ["kill", "freeze"])
def test_a_sender_that_dies_counts_by_the_share_that_arrived(what: str) -> None:
    kinds = [Kind(), Kind(), Kind(), Kind(bandwidth=0, weight=2)]
    swarm, outcomes, took = disturbed(kinds, 0.4, what, [3])
    victim = swarm.peers[3].peer_id
    for outcome in outcomes:
        assert isinstance(outcome, RoundResult)
        assert outcome.parts[0].senders == (0, 1, 2, 3) and outcome.parts[-1].senders == (0, 1, 2)
        arrived = sum(part.numel for part in outcome.parts if 3 in part.senders)
        share = arrived / sum(part.numel for part in outcome.parts)
        assert 0 < share < 1 and outcome.weights[victim] == pytest.approx(2 * share)
        assert f"only {share:.0%} of its tensors count" in outcome.left_out[victim]
    assert took < (2 if what == "kill" else 15)


@pytest.mark.parametrize(("what", "count"), [("kill", 2), ("freeze", 4)])
def test_without_a_reducer_the_round_is_soon_given_up_and_nobody_applies_it(what: str, count: int) -> None:
    """The others all name the one at fault, and find another group without it."""
    swarm, outcomes, took = disturbed([Kind() for _ in range(count)], 0.3, what, [count - 1])
    for outcome in outcomes:
        assert isinstance(outcome, RoundFailed) and "was lost: " in str(outcome)
        assert outcome.suspects == (swarm.peers[-1].peer_id,)
    assert took < (3 if what == "kill" else 20)


REDUCER, SENDER = Kind(), Kind(bandwidth=0.0)


@pytest.mark.parametrize(
    ("what", "kinds", "gone", "trust", "when", "ends"),
    [
        ("kill", [REDUCER] * 4, (0, 3), "members", 0.1, RoundFailed),
        ("kill", [REDUCER] * 4, (0, 3), "strangers", 0.1, RoundUndecided),  # more than f dead of n prove nothing
        ("kill", [REDUCER] * 5, (3, 4), "members", 0.6, RoundFailed),
        ("kill", [REDUCER] * 7, (4, 5, 6), "strangers", 0.1, RoundUndecided),
        ("leave", [REDUCER] * 7, (4, 5, 6), "strangers", 0.1, RoundFailed),  # they sign that they never vote
        ("kill", [REDUCER] * 8, (5, 6, 7), "strangers", 0.1, RoundFailed),
        ("kill", [SENDER, *[REDUCER] * 3], (0,), "strangers", 0.3, RoundResult),  # the leader
        ("kill", [*[REDUCER] * 6, SENDER, SENDER], (6, 7), "strangers", 0.6, RoundResult),
        ("kill", [*[REDUCER] * 3, SENDER, SENDER], (3, 4), "members", 0.6, RoundResult),
    ],
)
def test_survivors_soon_know_what_became_of_the_round(
    what: str, kinds: list[Kind], gone: tuple[int, ...], trust: Trust, when: float, ends: type
) -> None:
    _, outcomes, took = disturbed(kinds, when, what, gone, trust=trust)
    assert [type(outcome) for outcome in outcomes] == [ends] * (len(kinds) - len(gone))
    assert took < 10  # connections that were still on their way when the round began get five seconds


# Two messages, each behind a packet of four other connections, take 0.58 s at this bandwidth: no less can be asked for.
@pytest.mark.parametrize("what", ["kill", "leave"])
def test_one_that_fails_before_the_round_is_done_without_also_where_patience_is_short(what: str) -> None:
    kinds = [*[Kind(delay=0.2)] * 4, Kind(delay=0.2, bandwidth=0.0)]
    _, outcomes, took = disturbed(kinds, 0.0, what, [4], patience=0.7)
    for outcome in outcomes:
        assert isinstance(outcome, RoundResult) and len(outcome.contributors) == 4
    assert took < 8


@pytest.mark.parametrize("trust", ["strangers", "members"])
def test_a_round_in_which_everybody_was_left_out_is_none(trust: Trust) -> None:
    """Members begin later than anybody's patience: the group tries again, since by then they are there."""
    kinds = [Kind(delay=delay) for delay in (0, 0.6, 1.2, 1.8, 2.4)]
    for outcome in disturbed(kinds, 0.0, "leave", [], trust=trust, patience=0.5)[1]:
        assert isinstance(outcome, RoundFailed) or (isinstance(outcome, RoundResult) and outcome.contributors)


@pytest.mark.parametrize(
    ("halves", "trust", "ends"),
    [
        ((3, 2), "members", ("failed", "undecided")),
        ((2, 2), "members", ("failed", "failed")),
        ((4, 1), "strangers", ("failed", "undecided")),
        ((4, 3), "strangers", ("undecided", "undecided")),
    ],
)
@within(2000)
async def test_two_halves_of_a_cut_network(halves: tuple[int, int], trust: Trust, ends: tuple[str, str]) -> None:
    """Reducers are in either half, so nobody has all averages. Who are enough prove that nobody applies the round."""
    names = {RoundResult: "committed", RoundFailed: "failed", RoundUndecided: "undecided"}

    options = AllreduceOptions(part_size_bytes=512, trust=trust)
    async with Swarm([Kind() for _ in range(sum(halves))], bandwidth=BANDWIDTH, options=options) as swarm:

        async def cut() -> None:
            await asyncio.sleep(0.3)
            swarm.network.partition([peer.peer_id for peer in swarm.peers[: halves[0]]])

        outcomes = await swarm.round(cut)
        swarm.check(outcomes)
        expected = [ends[0]] * halves[0] + [ends[1]] * halves[1]
        assert [names[type(outcome)] for outcome in outcomes] == expected
        assert now() < 120


@within(2000)
async def test_the_deadline_of_a_round() -> None:
    options = AllreduceOptions(part_size_bytes=512, allreduce_timeout=3, sender_timeout=20)
    async with Swarm([Kind(), Kind(delay=30)], options=options) as swarm:
        outcomes = await swarm.round()
        assert isinstance(outcomes[0], RoundFailed) and "3 s" in str(outcomes[0])
        assert isinstance(outcomes[1], RoundFailed)  # it has heard that the other one gave up


class Memory(bytearray):
    """Memory that tells a test when it is freed."""


@pytest.mark.parametrize(
    "what", ["nothing", "kill a sender", "kill a sender that a reducer dialed", "cut off a reducer"]
)
def test_memory_goes_with_the_round_and_not_with_the_collector(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[weakref.ref[Memory]] = []
    ends: list[type] = []

    def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
        memory = Memory(size)
        given.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=dtype)

    async def main() -> None:
        options = AllreduceOptions(part_size_bytes=512)
        dialed = Kind(listening="dialed" not in what)
        async with Swarm([Kind(), Kind(), dialed, Kind(bandwidth=0)], bandwidth=BANDWIDTH, options=options) as swarm:

            async def disturb() -> None:
                await asyncio.sleep(0.3)
                if "kill a sender" in what:
                    swarm.kill(3)
                elif what == "cut off a reducer":
                    swarm.network.partition([swarm.peers[2].peer_id])
                    await asyncio.sleep(100)
                    swarm.network.heal()

            outcomes = await swarm.round(disturb)
            assert len(given) == 4
            ends.append(type(outcomes[1]))
            outcomes.clear()
            swarm.tasks.clear()
            await asyncio.sleep(100)  # whoever is still being served is served by then
            assert [memory() is not None for memory in given] == [False] * 4
            assert ends == [RoundFailed if what == "cut off a reducer" else RoundResult]

    monkeypatch.setattr(torch, "empty", empty)
    gc.disable()
    try:
        virtual_time.run(main(), timeout=2000)
    finally:
        gc.enable()
