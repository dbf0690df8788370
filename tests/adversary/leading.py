"""Lies of a leader about who is in its group, and as what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from swarmcli.averaging.consensus.certificate import sign_vote, signed, value_hash
from swarmcli.averaging.consensus.messages import (
    ZERO,
    Committed,
    Decided,
    Noted,
    OutcomeAnswer,
    OutcomeQuestion,
    VoteMessage,
)
from swarmcli.averaging.control import StepControl
from swarmcli.averaging.find.messages import Answer, Candidate, rank_of
from swarmcli.averaging.find.search import Search
from swarmcli.averaging.group import NONCE_BYTES, Group, Member
from swarmcli.network import PeerID
from swarmcli.network.identity import Identity
from swarmcli.network.wire.codec import decode, encode
from tests.adversary.lies import LIES, Liar
from tests.adversary.lies.base import on_each_try


def alter_entries(liar: Liar, alter: Callable[[Member], Member]) -> None:
    """Where it leads, its followers are told otherwise of each other than they have offered."""
    alter_list(liar, lambda followers: list(map(alter, followers)))


def alter_list(liar: Liar, alter: Callable[[list[Member]], list[Member]]) -> None:
    """Where it leads, this is the list of its followers; whoever is new in it reduces nothing."""
    assert liar.averager is not None
    finder = liar.averager.finder
    divide = finder._divide

    def altered(said: list[Member], epoch: float) -> tuple[list[Member], tuple[float, ...]]:
        members, shares = divide(said, epoch)
        leader, *followers = members
        liar.told.append("a group")
        followers = alter(followers)
        return [leader, *followers], (*shares, *(0.0 for _ in followers[len(shares) - 1 :]))

    finder._divide = altered  # type: ignore[method-assign]


ALTERED: dict[str, Callable[[Member], Member]] = {
    "an auxiliary": lambda member: replace(member, auxiliary=True),
    "one that gathered something else": lambda member: replace(member, gathered=b"\xa5other"),
    "one that does not send": lambda member: replace(member, bid=replace(member.bid, sends=False)),
    "one that needs long to send": lambda member: replace(member, bid=replace(member.bid, seconds=100.0)),
    "one at another address": lambda member: replace(member, addresses=("memory://elsewhere:1",)),
    "one that has claimed more": lambda member: replace(member, claim=member.claim + 1.0),
    "one with another standing": lambda member: replace(member, standing=not member.standing),
    "one that cannot be dialed": lambda member: replace(member, listening=False, addresses=()),
}


def begin_two(liar: Liar) -> None:
    """Where it leads, every second follower is told of another group of the same members."""
    assert liar.averager is not None
    finder, told = liar.averager.finder, [0]
    new_search = finder._new_search

    def search_of_two(control: StepControl, gathered: bytes) -> Search:
        search = new_search(control, gathered)
        end = search.lobby._end

        def end_otherwise(peer: PeerID, answer: Any) -> None:
            if isinstance(answer, Answer) and answer.verdict == "begins":
                told[0] += 1
                if told[0] % 2:
                    group = replace(decode(Group, answer.group), nonce=bytes(NONCE_BYTES))
                    other = msgspec.Raw(encode(group.signed(liar.endpoint.identity)))
                    answer = msgspec.structs.replace(answer, group=other)
                    liar.told.append("another group")
            end(peer, answer)

        search.lobby._end = end_otherwise  # type: ignore[method-assign]
        return search

    finder._new_search = search_of_two  # type: ignore[method-assign]


def give_up(liar: Liar) -> None:
    """Where it leads, it says that the round is to be given up."""

    def alter(round_: Any) -> None:
        if round_.mates.me == 0:
            asyncio.get_running_loop().call_soon(lambda: end(round_.agreement))

    def end(agreement: Any) -> None:
        liar.told.append("gave up")
        agreement._give_up = "it says so"
        agreement._hurry.set()
        agreement._zero.failed.set()

    on_each_try(liar, alter)


def hurry_to_the_front(liar: Liar, draws: int = 2000) -> None:
    """It begins each search with the id, of so many, that ranks first."""
    assert liar.averager is not None
    finder = liar.averager.finder
    describe = finder._me

    def best(*, looking: bool) -> Candidate:
        own = describe(looking=looking)
        if not looking:
            return own
        liar.told.append("a search")
        drawn = (replace(own, search=search_id_of(own, liar.random.randbytes(8))) for _ in range(draws))
        chosen = min(drawn, key=rank_of)
        finder._last_search = chosen.search
        return chosen

    finder._me = best  # type: ignore[method-assign]


def search_id_of(candidate: Candidate, noise: bytes) -> bytes:
    return candidate.search[: -len(noise)] + noise


def stuff(liar: Liar, keys: list[Identity]) -> None:
    """Where it leads, its group has members that exist as keys alone, nobody else reduces, and each follower is told
    that the group has committed what that follower holds, which differs from one to the next."""
    assert liar.averager is not None
    finder, service = liar.averager.finder, liar.averager._service
    take_vote, held = service._take_vote, dict[tuple[PeerID, bytes], asyncio.Future[bytes]]()
    identity = liar.endpoint.identity

    def divided(said: list[Member], epoch: float) -> tuple[list[Member], tuple[float, ...]]:
        if "a group" not in liar.told:
            LIES["two signed lists"].tell(liar)  # or they would have nothing to be unlike in
        liar.told.append("a group")
        phantoms = [
            Member(key.peer_id, bandwidth=0.0, addresses=(f"memory://phantom-{number}:1",), search=bytes(16))
            for number, key in enumerate(keys)
        ]
        return [*said, *phantoms], (1.0, *[0.0] * (len(said) + len(keys) - 1))

    def vote_of(peer: PeerID, group_id: bytes) -> asyncio.Future[bytes]:
        return held.setdefault((peer, group_id), asyncio.get_running_loop().create_future())

    async def vote(peer: PeerID, message: VoteMessage) -> Noted:
        if message.digest is not None and not vote_of(peer, message.group_id).done():
            vote_of(peer, message.group_id).set_result(message.digest)
        await take_vote(peer, message)
        return Noted()

    async def outcome(peer: PeerID, question: OutcomeQuestion) -> OutcomeAnswer:
        value = Committed(await vote_of(peer, question.group_id))
        group = service._votes[question.group_id].group
        mine = {
            group.index_of(key.peer_id): sign_vote(key, question.group_id, ZERO, "confirm", value_hash(value))
            for key in (identity, *keys)
            if key.peer_id in group
        }
        liar.told.append("an outcome")
        return OutcomeAnswer(Decided(value, signed(mine, ZERO, "confirm", value)))

    def alone(round_: Any) -> None:
        for key in keys:
            if key.peer_id in round_.group:
                round_._reducer.leave_out(round_.group.index_of(key.peer_id), "it exists as a key alone")

    on_each_try(liar, alone)
    finder._divide = divided  # type: ignore[method-assign]
    service.endpoint.withdraw(service.method("vote"), service.method("outcome"))
    service.endpoint.serve(service.method("vote"), VoteMessage, vote)
    service.endpoint.serve(service.method("outcome"), OutcomeQuestion, outcome)
