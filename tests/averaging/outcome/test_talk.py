"""What it costs to agree: words that nobody gets from everybody, so that a slow line takes part. And what one member
that says something else than it does costs the others: some seconds, and few words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from swarmcli.averaging.round.messages import RoundWord
from swarmcli.averaging.round.outcome import Action, SeenSheet, Sheet
from swarmcli.network import wire
from swarmcli.network.loop_thread import loop_time
from swarmcli.testing import virtual_time
from tests.averaging.outcome.talk import DIGEST, EXCHANGE, Holder, Voter, agree, voters_of

MEMBERS = 24
SIGNATURE = 64  # bytes
WORD = 400  # bytes of a word to another member, without words of others
KINDS = 2  # an echo and a vote
LINE = 10_000.0  # bytes per second


async def _sent_by_each() -> list[int]:
    async with voters_of(MEMBERS) as (_, voters):
        await agree(voters)
        assert all(voter.seconds is not None for voter in voters)
        return [voter.sent for voter in voters]


def test_nobody_gets_the_words_of_others_from_everybody() -> None:
    sent = virtual_time.run(_sent_by_each())
    own, of_others = 2 * KINDS * MEMBERS * WORD, 2 * KINDS * MEMBERS * SIGNATURE
    assert max(sent) < own + 2 * of_others  # each may be asked for all twice
    assert sum(sent) < MEMBERS * (own + of_others) / 2


async def _seconds_of_a_slow_one() -> tuple[float, list[float]]:
    async with voters_of(MEMBERS) as (network, voters):
        network.set_bandwidth(voters[-1].peer, LINE)
        await agree(voters)
        seconds = [voter.seconds for voter in voters if voter.seconds is not None]
        assert len(seconds) == MEMBERS
        return seconds[-1], seconds[:-1]


def test_a_member_behind_a_slow_line_agrees_and_holds_nobody_up() -> None:
    slow, others = virtual_time.run(_seconds_of_a_slow_one())
    assert max(others) < 1.0
    assert slow < 5.0


async def _beside(
    alter: Callable[[RoundWord], RoundWord], honest: int, parts: Holder | None = None
) -> tuple[list[Voter], float]:
    """`honest` of four voters end their exchange beside one that lies; the rest do not answer. Returns the honest ones,
    and the seconds until all of them have an end."""
    async with voters_of(4) as (network, voters):
        began, others, liar = loop_time(), voters[:honest], voters[3]
        for voter in voters[honest:3]:
            network.freeze(voter.peer)
        liar.lie(alter)
        async with asyncio.timeout(600):
            await asyncio.gather(*(voter.end_with(parts) for voter in others))
        return others, loop_time() - began


def _works(word: RoundWord) -> RoundWord:
    return replace(word, busy=True, settled=False, known=())


def test_who_says_that_it_still_works_is_waited_for_as_long_as_exchanges_may_take_and_not_longer() -> None:
    others, took = virtual_time.run(_beside(_works, 3, Holder(digest=None)))
    assert [voter.end for voter in others] == [Action.DEAD] * 3
    assert EXCHANGE < took < EXCHANGE + 5.0


def test_who_was_too_slow_for_the_exchange_is_not_waited_for_though_it_still_works() -> None:
    others, took = virtual_time.run(_beside(_works, 3, Holder(digest=None, slow={3})))
    assert [voter.end for voter in others] == [Action.DEAD] * 3
    assert took < EXCHANGE / 2


def test_of_a_word_nobody_keeps_more_than_what_it_says_of_its_teller() -> None:
    """Rounds are remembered for late questions: a megabyte of each word would be gigabytes."""

    async def main() -> int:
        async with voters_of(4) as (_, voters):
            agreement = voters[0].agreement
            assert agreement is not None
            forged = Sheet("vote", DIGEST, dict.fromkeys(range(4096), bytes(64)))
            round_id, blamed = agreement.mates.group.group_id, (3,) * 4096
            agreement.answer(3, RoundWord(round_id, "running", failed=blamed, seen=(), known=(forged,) * 3))
            return len(wire.encode(agreement.told[3]))

    assert virtual_time.run(main()) < 1000


def test_who_tells_of_words_and_does_not_give_them_is_not_asked_for_them_again_and_again() -> None:
    votes = SeenSheet("vote", b"another".ljust(32), b"\x0f")

    def promises(word: RoundWord) -> RoundWord:
        return replace(word, known=(), seen=(votes,))

    others, _ = virtual_time.run(_beside(promises, 2))
    assert [voter.end for voter in others] == [Action.UNDECIDED] * 2
    assert max(voter.words for voter in others) < 50


@pytest.mark.parametrize(("elsewhere", "end"), [(2, Action.COMMITTED), (3, Action.UNDECIDED)])
def test_who_votes_for_a_network_counts_only_if_it_is_there(elsewhere: int, end: Action) -> None:
    """Of seven networks on a list five decide. Keys that are connected from somewhere else vote like all others."""

    async def ends() -> list[Action | None]:
        async with voters_of(7, elsewhere) as (_, voters):
            await agree(voters)
            return [voter.end for voter in voters[: 7 - elsewhere]]

    assert virtual_time.run(ends()) == [end] * (7 - elsewhere)
