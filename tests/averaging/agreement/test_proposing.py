"""Proposers among members that lie about what they hold, forge ballots, or answer nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from swarmcli.averaging.agreement.ballot_messages import (
    Prepare,
    PrepareAnswer,
    Propose,
    ProposeAnswer,
    Repair,
    RepairAnswer,
    Verdict,
    VoteMessage,
)
from swarmcli.averaging.agreement.ballot_zero import BallotZero
from swarmcli.averaging.agreement.mates import Mates
from swarmcli.averaging.agreement.votes import RoundVotes
from swarmcli.averaging.allreduce.allreduce import Allreduce
from swarmcli.averaging.allreduce.holdings import NOTHING
from swarmcli.averaging.allreduce.patience import AllreduceOptions
from swarmcli.averaging.allreduce.results import AllreduceResult
from swarmcli.errors import CallRefused
from swarmcli.testing import virtual_time
from tests.averaging.rounds import Kind, Swarm


def claim_everything(answer: PrepareAnswer) -> PrepareAnswer:
    digests = answer.digests
    claimed = [digests[place : place + 32] for place in range(0, len(digests), 32)]
    return msgspec.structs.replace(answer, digests=b"".join(b"?" * 32 if each == NOTHING else each for each in claimed))


Lie = Callable[[PrepareAnswer], PrepareAnswer]

LIES: dict[str, Lie] = {
    "parts that it does not hold": claim_everything,
    "other digests": lambda answer: msgspec.structs.replace(answer, digests=b"!" * len(answer.digests)),
    "another number of parts": lambda answer: msgspec.structs.replace(answer, digests=answer.digests + bytes(32)),
    "an impossible promise": lambda answer: msgspec.structs.replace(answer, accepted_ballot=99999),
    "suspects of no group": lambda answer: msgspec.structs.replace(answer, suspects=(77, 4000)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_promise_with_false_holdings_does_not_stop_a_repair(lie: Lie, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Allreduce.disclose

    def disclose(self: Allreduce, promise: PrepareAnswer) -> PrepareAnswer:
        answer = honest(self, promise)
        return lie(answer) if self._mates.me == 2 else answer

    monkeypatch.setattr(Allreduce, "disclose", disclose)

    async def main() -> None:
        options = AllreduceOptions(part_size_bytes=512)
        kinds = [Kind(), Kind(), Kind(bandwidth=0), Kind(), Kind()]
        async with Swarm(kinds, bandwidth=20_000.0, options=options) as swarm:

            async def kill() -> None:
                await asyncio.sleep(0.3)
                swarm.kill(4)

            outcomes = await swarm.round(kill)
            swarm.check(outcomes)
            for index in (0, 1, 3):
                assert isinstance(outcomes[index], AllreduceResult)
            assert asyncio.get_running_loop().time() < 60

    virtual_time.run(main(), timeout=2000)


def test_forged_ballots_change_nothing_however_many_come() -> None:
    async def main() -> None:
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
                await refused("propose", Propose(group_id, 1, Verdict(bytes(32))), ProposeAnswer, "ballot")
                await refused("propose", Propose(group_id, 0, Verdict(bytes(32))), ProposeAnswer, "ballot")
                await refused("repair", Repair(group_id, 2, (0, 1), b"", (), ()), RepairAnswer, "ballot")
                method = target.service.method("prepare")
                answer = await forger.endpoint.call(
                    target.peer_id, method, Prepare(group_id, 2), PrepareAnswer, timeout=5
                )
                assert (
                    not answer.granted and answer.follows == 0
                )  # the leader leads, so nobody else is promised anything
                assert target.service._votes[group_id].acceptor.promised == 0

            assert len(swarm.check(await swarm.round(forge))) == 3

    virtual_time.run(main(), timeout=2000)


def test_the_leader_counts_no_vote_after_its_promise() -> None:
    async def main() -> None:
        async with Swarm([Kind(), Kind(), Kind()]) as swarm:
            group = swarm.group()
            mates, votes = Mates(swarm.peers[0].service, group), RoundVotes(group, 0)
            zero = BallotZero(mates, votes)
            zero.hear(0, VoteMessage(group.group_id, b"a" * 32))
            votes.prepare(2)
            zero.hear(1, VoteMessage(group.group_id, b"a" * 32))
            zero.hear(2, VoteMessage(group.group_id, b"a" * 32))
            assert zero.decision is None

    virtual_time.run(main())
