"""How voters of a guarded group compare a certificate with all others before they confirm it.

    leader or proposer   Confirm(certificate) ─▶ every voter
    each voter           Compare(certificate) ─▶ every other voter, which answers at once: a decision that it knows,
                         the certificate that it stands by instead, votes for other values in that ballot
                         … all have answered, or the time for it has passed
    each voter           its signed confirm ─▶ leader or proposer, which counts

A voter does not confirm if it finds an unlike value meanwhile. The time is a bound on the way to and fro between honest
voters: as long as their messages keep to it, they never confirm two unlike results, even where more than a third is
hostile.
"""

from __future__ import annotations

import asyncio

from swarmcli.averaging.consensus.acceptor import RoundVotes
from swarmcli.averaging.consensus.messages import Compare, CompareAnswer, Confirm, ConfirmAnswer, Decided, Prepared
from swarmcli.averaging.consensus.presence import GroupCalls
from swarmcli.averaging.consensus.strangers import Confirms
from swarmcli.errors import NetworkError


def bound(mates: GroupCalls) -> float:
    """Seconds to compare."""
    options = mates.options
    return options.compare + min(options.compare_trips * mates.slowest_round_trip, options.most_compare_trips)


async def confirm(mates: GroupCalls, votes: RoundVotes, prepared: Prepared) -> ConfirmAnswer:
    """Compares with all others, then answers the leader or proposer."""
    guarded = votes.guarded
    if votes.decided is not None:
        return ConfirmAnswer(decided=votes.decided)
    if guarded is None or not votes.votes or not votes.see(prepared) or not guarded.compare(prepared):
        return _refusal(votes, prepared)
    agreed = True
    try:
        async with asyncio.timeout(bound(mates)), asyncio.TaskGroup() as tasks:
            others = votes.quorum.voters - {mates.me}
            asked = [tasks.create_task(_ask(mates, votes, prepared, other)) for other in sorted(others)]
            for answer in asyncio.as_completed(asked):
                agreed = await answer and agreed
    except TimeoutError:
        pass  # a voter that has not answered by now is hostile, or lost
    if votes.decided is not None:
        return ConfirmAnswer(decided=votes.decided)
    if not agreed or not guarded.confirm(prepared):
        guarded.withdraw(prepared)
        return _refusal(votes, prepared)
    return ConfirmAnswer(votes.sign(prepared.votes.ballot, "confirm", prepared.value))


def compare(votes: RoundVotes, prepared: Prepared) -> CompareAnswer:
    """Answers another voter that compares."""
    if votes.decided is not None:
        return CompareAnswer(decided=votes.decided)
    if votes.guarded is None or not votes.electorate.is_prepared(prepared, thin=True):
        return CompareAnswer()
    votes.see(prepared)
    return CompareAnswer(votes.guarded.contradicts(prepared), votes.guarded.seen.unlike(prepared.votes))


def _refusal(votes: RoundVotes, prepared: Prepared) -> ConfirmAnswer:
    return ConfirmAnswer(unlike=() if votes.guarded is None else votes.guarded.seen.unlike(prepared.votes))


async def _ask(mates: GroupCalls, votes: RoundVotes, prepared: Prepared, other: int) -> bool:
    """Whether another voter has nothing against it. A voter that cannot be reached has nothing."""
    question = Compare(mates.group.group_id, prepared)
    try:
        answer = await mates.ask(other, "compare", question, CompareAnswer, bound(mates))
    except NetworkError:
        return True
    if answer.decided is not None and votes.electorate.is_decided(answer.decided, thin=True):
        # Believed or not, another member has this decision: this one may confirm no other value any more.
        return votes.learn(answer.decided) and answer.decided.votes.value == prepared.votes.value
    votes.note_all(answer.unlike)
    standing = answer.standing
    if standing is None or standing.votes.value == prepared.votes.value:
        return True
    votes.see(standing)
    return not votes.electorate.is_prepared(standing, thin=True)


async def gather_confirms(mates: GroupCalls, votes: RoundVotes, prepared: Prepared) -> Decided | None:
    """Has a certificate confirmed by a quorum. None: too few confirm it, or not within the time for it."""
    confirms = Confirms(prepared, votes.electorate)
    question = Confirm(mates.group.group_id, prepared)

    async def ask(voter: int) -> tuple[int, ConfirmAnswer]:
        if voter == mates.me:
            return voter, await confirm(mates, votes, prepared)
        try:
            return voter, await mates.ask(voter, "confirm", question, ConfirmAnswer)
        except NetworkError:
            return voter, ConfirmAnswer()

    async with asyncio.TaskGroup() as tasks:
        waiting = {tasks.create_task(ask(voter)) for voter in sorted(votes.quorum.voters)}
        try:
            async with asyncio.timeout(2 * bound(mates)):
                while waiting and not confirms.hopeless and confirms.decided is None and votes.decided is None:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        _count(votes, confirms, *task.result())
        except TimeoutError:
            pass
        finally:
            for task in waiting:
                task.cancel()
    return votes.decided or confirms.decided


def _count(votes: RoundVotes, confirms: Confirms, voter: int, answer: ConfirmAnswer) -> None:
    prepared = confirms.prepared
    ballot, value = prepared.votes.ballot, prepared.votes.value
    votes.note_all(answer.unlike)
    if answer.decided is not None and votes.learn(answer.decided):
        return
    if answer.signature and votes.electorate.is_vote(voter, ballot, "confirm", value, answer.signature):
        confirms.add(voter, answer.signature)
    else:
        confirms.lose(voter)
