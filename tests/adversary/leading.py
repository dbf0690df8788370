"""Lies of a leader about who is in its group, and as what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from swarmcli.averaging.certificate import Kind
from swarmcli.averaging.find.messages import Answer
from swarmcli.averaging.find.seek import Search
from swarmcli.averaging.group import NONCE_BYTES, Group, Member
from swarmcli.averaging.round.messages import RoundWord
from swarmcli.network import PeerID
from swarmcli.network.identity import Identity
from swarmcli.network.wire.codec import decode, encode
from tests.adversary.lies import LIES, Liar
from tests.adversary.lies.base import on_each_exchange
from tests.adversary.lies.votes import Saying, alter_words

KINDS: tuple[Kind, ...] = ("echo", "vote")


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

    def of_two(search: Search) -> Search:
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

    if finder.search is not None:  # it looks already
        of_two(finder.search)
    finder._new_search = lambda *how: of_two(new_search(*how))  # type: ignore[method-assign]


def give_up(liar: Liar) -> None:
    """Where it leads, it signs that it gives the round up as soon as it begins."""
    LIES["give-up at once"].tell(liar)


def stuff(liar: Liar, keys: list[Identity]) -> None:
    """Where it leads, its group has members that exist as keys alone, nobody else reduces, and each follower is shown
    echoes and votes of all these keys for what that follower holds, which differs from one to the next."""
    assert liar.averager is not None
    finder = liar.averager.finder

    def divided(said: list[Member], epoch: float) -> tuple[list[Member], tuple[float, ...]]:
        if "a group" not in liar.told:
            LIES["two signed lists"].tell(liar)  # or they would have nothing to be unlike in
        liar.told.append("a group")
        phantoms = [
            Member(key.peer_id, bandwidth=0.0, addresses=(f"memory://phantom-{number}:1",), search=bytes(16))
            for number, key in enumerate(keys)
        ]
        return [*said, *phantoms], (1.0, *[0.0] * (len(said) + len(keys) - 1))

    def signed_by_all(saying: Saying, word: RoundWord) -> RoundWord:
        heard, group = saying.agreement.outcome.beyond(()), saying.agreement.mates.group
        held = [sheet.digest for sheet in heard if sheet.kind == "echo" and saying.member in sheet.signatures]
        present = [key for key in (liar.endpoint.identity, *keys) if key.peer_id in group]
        liar.told.extend(["an outcome"] if held else [])
        return saying.without_own(word, *(saying.signed(kind, digest, present) for digest in held for kind in KINDS))

    def alone(exchange: Any) -> None:
        for key in keys:
            if key.peer_id in exchange.group:
                exchange._reducer.leave_out(exchange.group.index_of(key.peer_id), "it exists as a key alone")

    on_each_exchange(liar, alone)
    alter_words(liar, signed_by_all)
    finder._divide = divided  # type: ignore[method-assign]
