"""Lies about the outcome of a round: echoes, votes, give-ups, and silence where others wait."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from swarmcli.averaging.certificate import NOTHING, Kind, sign_word
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.agreement import Agreement
from swarmcli.averaging.round.messages import RoundWord
from swarmcli.averaging.round.outcome import SeenSheet, Sheet
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.errors import CallRefused
from swarmcli.network.identity import SIGNATURE_BYTES, Identity, PeerID
from tests.adversary.lies.base import Liar, lie

_OTHER = b"another result".ljust(32)


@dataclass(frozen=True)
class Saying:
    """What the liar is about to say: to whom, as one of which round."""

    liar: Liar
    agreement: Agreement
    member: int

    def signed(self, kind: Kind, digest: bytes, identities: Iterable[Identity] = ()) -> Sheet:
        """A sheet with the liar's own signature, or those of these identities."""
        group = self.agreement.mates.group
        signers = list(identities) or [self.liar.endpoint.identity]
        signatures = {group.index_of(e.peer_id): sign_word(e, group.group_id, kind, digest) for e in signers}
        return Sheet(kind, digest, dict(sorted(signatures.items())))

    def without_own(self, word: RoundWord, *more: Sheet) -> RoundWord:
        """The word without what the liar has honestly signed, with these sheets instead."""
        me, sheets = self.agreement.mates.me, []
        for sheet in word.known:
            others = {member: each for member, each in sheet.signatures.items() if member != me}
            sheets += [msgspec.structs.replace(sheet, signatures=others)] if others else []
        return msgspec.structs.replace(word, known=(*sheets, *more))


def alter_words(liar: Liar, alter: Callable[[Saying, RoundWord], RoundWord]) -> None:
    """Whatever it tells other members of its rounds' outcomes, or answers, goes through `alter`."""
    service = _service(liar)
    made, seen = service._agreement_for, set[int]()

    def altered(group: Group) -> Agreement:
        agreement = made(group)
        if id(agreement) not in seen:
            seen.add(id(agreement))
            word = agreement.word
            agreement.word = lambda member, **how: told(agreement, member, word(member, **how))  # type: ignore[method-assign,misc]
        return agreement

    def told(agreement: Agreement, member: int, word: RoundWord) -> RoundWord:
        liar.told.append("a word")
        return alter(Saying(liar, agreement, member), word)

    service._agreement_for = altered  # type: ignore[method-assign]


def _service(liar: Liar) -> AllreduceService:
    assert liar.averager is not None
    return liar.averager._service


@lie("silence about the outcome", "votes", at_most="some seconds of one round: the others decide without it")
def say_nothing(liar: Liar) -> None:
    service = _service(liar)
    call = service.endpoint.call

    async def silent(peer: PeerID, word: RoundWord) -> RoundWord:
        liar.told.append("nothing")
        await asyncio.sleep(1e6)
        return word

    async def mute(peer: PeerID, method: str, request: Any, answer_type: type[Any], **options: Any) -> Any:
        if method == service.method("outcome"):
            raise CallRefused("silent", "this peer does not say it")
        return await call(peer, method, request, answer_type, **options)

    service.endpoint.call = mute  # type: ignore[method-assign,assignment]
    service.endpoint.withdraw(service.method("outcome"))
    service.endpoint.serve(service.method("outcome"), RoundWord, silent)


@lie("signatures that are none", "votes", at_most="as if it had not voted; a check for each of its words")
def sign_nothing(liar: Liar) -> None:
    def alter(saying: Saying, word: RoundWord) -> RoundWord:
        everybody = dict.fromkeys(range(len(saying.agreement.mates)), bytes(SIGNATURE_BYTES))
        return saying.without_own(word, Sheet("echo", _OTHER, everybody), Sheet("vote", _OTHER, everybody))

    alter_words(liar, alter)


@lie("echo and vote for another result", "votes", at_most="as if it had not voted")
def sign_another(liar: Liar) -> None:
    alter_words(
        liar,
        lambda saying, word: saying.without_own(word, saying.signed("echo", _OTHER), saying.signed("vote", _OTHER)),
    )


@lie("words for one half and for the other", "votes", at_most="as if it had not voted; it is banned")
def sign_two(liar: Liar) -> None:
    """Every second member is shown an echo and a vote for another result."""

    def alter(saying: Saying, word: RoundWord) -> RoundWord:
        if saying.member % 2:
            return word
        return saying.without_own(word, saying.signed("echo", _OTHER), saying.signed("vote", _OTHER))

    alter_words(liar, alter)


@lie("vote and give-up", "votes", at_most="as if it had not voted; it is banned")
def vote_and_give_up(liar: Liar) -> None:
    def alter(saying: Saying, word: RoundWord) -> RoundWord:
        gives_up = saying.signed("give-up", NOTHING)
        return msgspec.structs.replace(word, known=(*word.known, gives_up))

    alter_words(liar, alter)


@lie("results that only it names", "votes", at_most="as if it had not voted")
def sign_its_own(liar: Liar) -> None:
    """With f liars there are more digests than a message has sheets."""

    def alter(saying: Saying, word: RoundWord) -> RoundWord:
        digests = [bytes([0, saying.agreement.mates.me, number]).ljust(32, b"\0") for number in range(2)]
        return saying.without_own(word, *(saying.signed(kind, each) for kind in ("echo", "vote") for each in digests))

    alter_words(liar, alter)


@lie("give-up at once", "votes", at_most="as if it had not voted")
def give_up_at_once(liar: Liar) -> None:
    alter_words(liar, lambda saying, word: saying.without_own(word, saying.signed("give-up", NOTHING)))


@lie("work without end", "votes", at_most="the time of a round, for those that have no result")
def work_for_ever(liar: Liar) -> None:
    """It says that it still exchanges, and never signs anything."""
    alter_words(liar, lambda saying, word: msgspec.structs.replace(saying.without_own(word), busy=True, settled=False))


@lie("work now and then", "votes", at_most="the time of a round, for those that have no result")
def work_now_and_then(liar: Liar) -> None:
    """It changes its mind whether it may sign yet, and never signs anything."""
    busy = itertools.cycle([True, False])

    def alter(saying: Saying, word: RoundWord) -> RoundWord:
        return msgspec.structs.replace(saying.without_own(word), standing="running", busy=next(busy), settled=False)

    alter_words(liar, alter)


@lie("words that it does not give", "votes", at_most="a question in a second, for those that have no result")
def tell_of_more(liar: Liar) -> None:
    """It tells of other words each time, gives none, and never signs anything."""

    def alter(saying: Saying, word: RoundWord) -> RoundWord:
        seen = (SeenSheet("echo", liar.random.randbytes(32), b"\xff"),)
        word = msgspec.structs.replace(saying.without_own(word), standing="running", busy=True, settled=False)
        return msgspec.structs.replace(word, seen=seen)

    alter_words(liar, alter)


@lie("blame for everybody", "votes", at_most="nothing")
def blame_everybody(liar: Liar) -> None:
    def alter(saying: Saying, word: RoundWord) -> RoundWord:
        others = tuple(saying.agreement.mates.others)
        return msgspec.structs.replace(saying.without_own(word), failed=others, reason="all of them failed")

    alter_words(liar, alter)
