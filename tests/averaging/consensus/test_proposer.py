"""Proposers among members that lie about what they hold, forge ballots, or answer nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.consensus.acceptor import RoundVotes
from swarmcli.averaging.consensus.ballots import Promise
from swarmcli.averaging.consensus.leader import Agreement
from swarmcli.averaging.consensus.messages import (
    Committed,
    Prepare,
    PrepareAnswer,
    Propose,
    ProposeAnswer,
    Report,
    VoteMessage,
)
from swarmcli.averaging.consensus.presence import GroupCalls
from swarmcli.averaging.consensus.proposer import BallotZero
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.allreduce import AllreduceResult
from swarmcli.averaging.round.buffers import NOTHING
from swarmcli.errors import CallRefused
from tests.averaging.rounds import Kind, Swarm
from tests.simulation import now, simulated, within


def claim_everything(report: Report) -> Report:
    digests = report.digests
    claimed = [digests[place : place + 32] for place in range(0, len(digests), 32)]
    return msgspec.structs.replace(report, digests=b"".join(b"?" * 32 if each == NOTHING else each for each in claimed))


def lie_about(**fields: object) -> Callable[[PrepareAnswer], PrepareAnswer]:
    return lambda answer: msgspec.structs.replace(answer, report=msgspec.structs.replace(answer.report, **fields))


def _impossible(promise: Promise | None) -> Promise:
    forged = Promise(promise.ballot if promise is not None else 1)
    object.__setattr__(forged, "accepted_ballot", 99999)  # an honest one cannot be made like that
    return forged


Lie = Callable[[PrepareAnswer], PrepareAnswer]

LIES: dict[str, Lie] = {
    "parts that it does not hold": lambda answer: msgspec.structs.replace(
        answer, report=claim_everything(answer.report)
    ),
    "other digests": lie_about(digests=b"!" * 320),
    "another number of parts": lie_about(digests=bytes(32)),
    "another plan": lie_about(plan=bytes(32)),
    "an impossible promise": lambda answer: msgspec.structs.replace(answer, promise=_impossible(answer.promise)),
    "failures of no group": lie_about(failed=(77, 4000)),
    "that all have failed": lie_about(failed=(0, 1, 2, 3, 4)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
@within(2000)
async def test_a_promise_with_a_false_report_does_not_stop_another_try(
    lie: Lie, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Agreement.prepare

    async def prepare(self: Agreement, member: int, ballot: int) -> PrepareAnswer:
        answer = await honest(self, member, ballot)
        return lie(answer) if self._mates.me == 2 and answer.report is not None else answer

    monkeypatch.setattr(Agreement, "prepare", prepare)

    options = AllreduceOptions(part_size_bytes=512, trust="members")  # a dead one and a liar are more than f of 5
    kinds = [Kind(), Kind(), Kind(bandwidth=0), Kind(), Kind()]
    async with Swarm(kinds, bandwidth=20_000.0, options=options) as swarm:

        async def kill() -> None:
            await asyncio.sleep(0.3)
            swarm.kill(4)

        outcomes = await swarm.round(kill)
        swarm.check(outcomes)
        for index in (0, 1, 3):
            assert isinstance(outcomes[index], AllreduceResult)
        assert now() < 60


@within(2000)
async def test_a_member_that_claims_what_it_does_not_hold_uses_up_no_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """It claims other averages in each try, and that all others have failed, so that its word stands against theirs."""
    honest, claims = Agreement.prepare, iter(b"123456789")

    async def prepare(self: Agreement, member: int, ballot: int) -> PrepareAnswer:
        answer = await honest(self, member, ballot)
        if self._mates.me != 1 or answer.report is None:
            return answer
        return lie_about(digests=bytes([next(claims)]) * len(answer.report.digests), failed=(0, 2, 3))(answer)

    monkeypatch.setattr(Agreement, "prepare", prepare)

    options = AllreduceOptions(part_size_bytes=512)
    async with Swarm([Kind(), Kind(bandwidth=0), Kind(), Kind()], bandwidth=20_000.0, options=options) as swarm:

        async def kill() -> None:
            await asyncio.sleep(0.3)
            swarm.kill(3)

        outcomes = await swarm.round(kill)
        swarm.check(outcomes)
        for index in (0, 2):
            outcome = outcomes[index]
            assert isinstance(outcome, AllreduceResult) and outcome.tries == 2


@within(2000)
async def test_forged_ballots_change_nothing_however_many_come() -> None:
    async with Swarm([Kind(), Kind(), Kind(delay=30)]) as swarm:
        target, forger = swarm.peers[0], swarm.peers[1]

        async def refused(name: str, request: object, answer: type, code: str) -> None:
            with pytest.raises(CallRefused) as caught:
                await forger.endpoint.call(target.peer_id, target.service.method(name), request, answer, timeout=5)
            assert caught.value.code == code

        async def forge() -> None:
            await asyncio.sleep(1)
            (group_id,) = target.service._rounds
            for turn in range(200):
                await refused("prepare", Prepare(group_id, 1 + 3 * turn), PrepareAnswer, "ballot")
            await refused("prepare", Prepare(group_id, 2 + 3 * 100_000), PrepareAnswer, "ballot")
            await refused("propose", Propose(group_id, 1, Committed(bytes(32))), ProposeAnswer, "ballot")
            await refused("propose", Propose(group_id, 0, Committed(bytes(32))), ProposeAnswer, "ballot")
            method = target.service.method("prepare")
            answer = await forger.endpoint.call(target.peer_id, method, Prepare(group_id, 2), PrepareAnswer, timeout=5)
            assert (
                answer.promise is None and answer.follows == 0
            )  # the leader leads, so nobody else is promised anything
            assert target.service._votes[group_id].acceptor.promised == 0

        assert len(swarm.check(await swarm.round(forge))) == 3


@simulated
async def test_the_leader_counts_no_vote_after_its_promise() -> None:
    async with Swarm([Kind(), Kind(), Kind()]) as swarm:
        group = swarm.group()
        mates, votes = _mates(swarm, group), RoundVotes(group, swarm.peers[0].endpoint.identity)
        zero = BallotZero(mates, votes)

        def vote(member: int) -> None:
            other = RoundVotes(group, swarm.peers[member].endpoint.identity)
            zero.hear(member, VoteMessage(group.group_id, b"a" * 32, signature=other.vote_zero(b"a" * 32)))

        vote(0)
        votes.prepare(2)
        vote(1)
        vote(2)
        assert zero.decided is None


def _mates(swarm: Swarm, group: Group) -> GroupCalls:
    return GroupCalls(swarm.peers[0].endpoint, swarm.peers[0].service.method, group)
