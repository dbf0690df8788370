"""Lies about the outcome of a round: votes, certificates, decisions, and silence where others wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from swarmcli.averaging.consensus.acceptor import RoundVotes
from swarmcli.averaging.consensus.ballots import ballot_after
from swarmcli.averaging.consensus.certificate import signed, value_hash
from swarmcli.averaging.consensus.messages import (
    ZERO,
    Certificate,
    Committed,
    Compare,
    CompareAnswer,
    Confirm,
    ConfirmAnswer,
    Decided,
    OutcomeAnswer,
    OutcomeQuestion,
    Prepare,
    PrepareAnswer,
    PresenceAnswer,
    PresenceQuestion,
    VoteMessage,
)
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.errors import CallRefused, NetworkError
from swarmcli.network.identity import SIGNATURE_BYTES, PeerID
from tests.adversary.lies.base import Liar, lie

_OTHER = Committed(b"another result".ljust(32))
_FOR_EVER = 1e6  # seconds


def _service(liar: Liar) -> AllreduceService:
    assert liar.averager is not None
    return liar.averager._service


def _answer(liar: Liar, name: str, kind: type[Any], handler: Callable[[PeerID, Any], Awaitable[Any]]) -> None:
    """Answers a call otherwise than honest members do."""
    service = _service(liar)

    async def told(peer: PeerID, message: Any) -> Any:
        liar.told.append(name)
        return await handler(peer, message)

    service.endpoint.withdraw(service.method(name))
    service.endpoint.serve(service.method(name), kind, told)


def _ask(liar: Liar, name: str, alter: Callable[[Any], Any | None]) -> None:
    """Sends something else in such calls; nothing where `alter` gives None."""
    service = _service(liar)
    call = service.endpoint.call

    async def altered(peer: PeerID, method: str, request: Any, answer_type: type[Any], **options: Any) -> Any:
        if method == service.method(name):
            liar.told.append(name)
            request = alter(request)
            if request is None:
                raise CallRefused("silent", "this peer does not say it")
        return await call(peer, method, request, answer_type, **options)

    service.endpoint.call = altered  # type: ignore[method-assign,assignment]


async def _silence(peer: PeerID, message: Any) -> Any:
    await asyncio.sleep(_FOR_EVER)


def _forged(votes: RoundVotes | None) -> Decided:
    """A decision that nobody has voted for but the liar."""
    if votes is None:
        return Decided(_OTHER, Certificate(ZERO, "vote", value_hash(_OTHER), {}))
    signatures = dict.fromkeys(range(len(votes.group)), bytes(SIGNATURE_BYTES))
    signatures[votes.me] = votes.sign(ZERO, votes.kind, _OTHER)
    return Decided(_OTHER, signed(signatures, ZERO, votes.kind, _OTHER))


@lie("leader that tells no outcome", "votes", at_most="some seconds of one round: the next in rank leads")
def tell_no_outcome(liar: Liar) -> None:
    _answer(liar, "outcome", OutcomeQuestion, _silence)
    _ask(liar, "confirm", lambda request: None)
    _ask(liar, "prepare", lambda request: None)


@lie("leader that outbids every ballot", "votes", at_most="the turn of a leader that does nothing")
def outbid_for_ever(liar: Liar) -> None:
    service = _service(liar)
    call, asked, highest = service.endpoint.call, set[PeerID](), [0]
    tell_no_outcome(liar)

    async def outbid(peer: PeerID, group_id: bytes) -> None:
        while group_id in service._votes:
            highest[0] = ballot_after(highest[0], service._votes[group_id].me, len(service._votes[group_id].group))
            with suppress(NetworkError):
                answer = await call(
                    peer, service.method("prepare"), Prepare(group_id, highest[0]), PrepareAnswer, timeout=1.0
                )
                highest[0] = max(highest[0], answer.promised)
            await asyncio.sleep(0.02)

    async def answer(peer: PeerID, question: OutcomeQuestion) -> OutcomeAnswer:
        liar.told.append("outcome")
        if peer not in asked:
            asked.add(peer)
            service.endpoint._context.tasks.spawn(outbid(peer, question.group_id))
        await asyncio.sleep(_FOR_EVER)
        return OutcomeAnswer()

    async def live(peer: PeerID, question: PresenceQuestion) -> PresenceAnswer:
        return PresenceAnswer("running", idle=True)  # and keeps to itself what it knows

    service.endpoint.withdraw(service.method("outcome"))
    service.endpoint.serve(service.method("outcome"), OutcomeQuestion, answer)
    _answer(liar, "presence", PresenceQuestion, live)


@lie("decision without votes", "votes", at_most="nothing, but that its word is asked for no more in this round")
def tell_forged_outcome(liar: Liar) -> None:
    service = _service(liar)

    async def answer(peer: PeerID, question: OutcomeQuestion) -> OutcomeAnswer:
        return OutcomeAnswer(_forged(service._votes.get(question.group_id)))

    _answer(liar, "outcome", OutcomeQuestion, answer)


@lie("presence that brings a false decision", "votes", at_most="nothing")
def tell_forged_presence(liar: Liar) -> None:
    service = _service(liar)

    async def answer(peer: PeerID, question: PresenceQuestion) -> PresenceAnswer:
        return PresenceAnswer("running", _forged(service._votes.get(question.group_id)), idle=True)

    _answer(liar, "presence", PresenceQuestion, answer)


@lie("voter that withholds its vote", "votes", at_most="about a second of one round: the others confirm without it")
def withhold_vote(liar: Liar) -> None:
    _ask(liar, "vote", lambda request: None)


@lie("vote without a signature", "votes", at_most="as if it had not voted")
def vote_unsigned(liar: Liar) -> None:
    _ask(liar, "vote", lambda vote: msgspec.structs.replace(vote, signature=bytes(SIGNATURE_BYTES)))


@lie("vote for another result", "votes", at_most="as if it had not voted")
def vote_otherwise(liar: Liar) -> None:
    service = _service(liar)

    def alter(vote: VoteMessage) -> VoteMessage:
        votes = service._votes[vote.group_id]
        return VoteMessage(vote.group_id, _OTHER.digest, signature=votes.sign(ZERO, votes.kind, _OTHER))

    _ask(liar, "vote", alter)


@lie("silence while others compare", "votes", at_most="the bound for comparing, two seconds, of one round")
def compare_silently(liar: Liar) -> None:
    _ask(liar, "vote", lambda request: None)
    _answer(liar, "compare", Compare, _silence)
    _answer(liar, "confirm", Confirm, _silence)


@lie("confirm for something else", "votes", at_most="as if it had not confirmed")
def confirm_otherwise(liar: Liar) -> None:
    service = _service(liar)

    async def answer(peer: PeerID, message: Confirm) -> ConfirmAnswer:
        return ConfirmAnswer(service._votes[message.group_id].sign(ZERO, "confirm", _OTHER))

    _ask(liar, "vote", lambda request: None)
    _answer(liar, "confirm", Confirm, answer)


@lie("second vote, shown to those who compare", "votes", at_most="nothing; its identity is banned")
def vote_twice(liar: Liar) -> None:
    service = _service(liar)

    async def answer(peer: PeerID, message: Compare) -> CompareAnswer:
        votes = service._votes[message.group_id]
        both = [
            Certificate(ZERO, "vote", value_hash(value), {votes.me: votes.sign(ZERO, "vote", value)})
            for value in (_OTHER, Committed(bytes(32)))
        ]
        return CompareAnswer(unlike=tuple(both))

    _ask(liar, "vote", lambda request: None)
    _answer(liar, "compare", Compare, answer)
