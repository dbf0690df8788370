"""What it costs to agree: words that nobody gets from everybody, so that a slow line takes part."""

from __future__ import annotations

from swarmcli.testing import virtual_time
from tests.averaging.outcome.talk import agree, voters_of

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
