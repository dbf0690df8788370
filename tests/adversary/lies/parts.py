"""Lies about what travels in a round: parts, weights, averages, their signatures, and copies of what others lack."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import torch

from swarmcli.averaging.audit.signed import SignedAverages, averages_root, digest_of
from swarmcli.averaging.config import MAX_WEIGHT
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.messages import AverageHeader, Farewell, SenderTerms
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.averaging.round.signed import SignedLists
from swarmcli.averaging.trust import ProofMessage, ProofTaken, UnlikeAverages
from swarmcli.compression.base import NoCompression, tensor_memory
from swarmcli.errors import CallRefused, NetworkError
from swarmcli.network import Stream
from swarmcli.network.identity import PeerID
from tests.adversary.lies.base import Liar, lie, on_each_exchange


class _Altered:
    """A stream on which some messages are sent otherwise than meant, or later."""

    def __init__(self, stream: Stream, alter: Callable[[Any, Any], Awaitable[tuple[Any, Any]]]) -> None:
        self._stream, self._alter = stream, alter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, message: Any, payload: Any = ()) -> None:
        await self._stream.send(*await self._alter(message, payload))


def as_reducer(liar: Liar, alter: Callable[[Any, Stream, Any, Any], Awaitable[tuple[Any, Any]]]) -> None:
    """`alter` gets the try, the stream to a member, and each message to it with its payload."""

    def on_try(round_: Any) -> None:
        distribute = round_._receiver._distribute
        round_._receiver._distribute = lambda stream: distribute(
            _Altered(stream, lambda message, payload: alter(round_, stream, message, payload))
        )

    on_each_exchange(liar, on_try)


def as_sender(liar: Liar, alter: Callable[[Any, Any], Awaitable[tuple[Any, Any]]]) -> None:
    def on_try(round_: Any) -> None:
        send = round_._sender._send
        round_._sender._send = lambda parts, mine, stream: send(parts, mine, _Altered(stream, alter))

    on_each_exchange(liar, on_try)


def _shifted(payload: Any) -> memoryview:
    """Other finite numbers of the same type: those of an average, the other way round."""
    values = torch.frombuffer(bytearray(b"".join(bytes(piece) for piece in payload)), dtype=torch.float32)
    return tensor_memory(values.neg_())


def _is_odd(round_: Any, stream: Stream) -> bool:
    """Of the members every second one, so that some see the one face and some the other."""
    return bool(round_.group.index_of(stream.peer) % 2)


@lie("two signed lists", "parts", at_most="a round; it is banned from the run by evidence")
def two_faces(liar: Liar) -> None:
    """Every second member gets other values, and a signature for just these."""
    given: dict[tuple[bytes, PeerID], list[tuple[bytes, bytes]]] = {}  # digest, and hash of the inputs

    async def alter(round_: Any, stream: Stream, message: Any, payload: Any) -> tuple[Any, Any]:
        if not _is_odd(round_, stream):
            return message, payload
        mine = given.setdefault((round_.group.group_id, stream.peer), [])
        if isinstance(message, AverageHeader):
            part = round_._reducer.parts[len(mine)]
            content = None
            if message.tensor is not None:
                payload = _shifted(payload)
                content = NoCompression().compress(torch.frombuffer(payload, dtype=torch.float32))
            digest = digest_of(part.index, message.senders, message.weights, content)
            mine.append((digest, message.inputs or b""))
        elif isinstance(message, Farewell):
            other = SignedLists(round_.group, liar.averager._service.prefix, liar.averager.trust)  # type: ignore[union-attr]
            root = averages_root(b"".join(each[0] for each in mine), b"".join(each[1] for each in mine))
            signed = other.sign(round_.mates.me, liar.endpoint.identity, root)
            liar.told.append("another signature")
            message = msgspec.structs.replace(message, averages=signed)
        return message, payload

    as_reducer(liar, alter)


@lie("the signature of another round", "parts", at_most="a round, and a second one without it as a reducer")
def old_signature(liar: Liar) -> None:
    """It shows what it signed in its first try, in every later one."""
    first: list[Any] = []

    async def alter(round_: Any, stream: Stream, message: Any, payload: Any) -> tuple[Any, Any]:
        if isinstance(message, Farewell):
            first.append(message.averages)
            if first[0] != message.averages:
                liar.told.append("an old signature")
            message = msgspec.structs.replace(message, averages=first[0])
        return message, payload

    as_reducer(liar, alter)


@lie("members that are not there", "parts", at_most="nothing")
def leave_out_nobody(liar: Liar) -> None:
    """It says that it has left out members whom the group does not have."""

    async def alter(round_: Any, stream: Stream, message: Any, payload: Any) -> tuple[Any, Any]:
        if isinstance(message, Farewell):
            liar.told.append("a member that is not there")
            message = msgspec.structs.replace(message, left_out={len(round_.group): "it was late", 4095: "so was it"})
        return message, payload

    as_reducer(liar, alter)


@lie("weights without bound", "parts", at_most="its share of the weight; it is left out if a sum could overflow")
def huge_weights(liar: Liar) -> None:
    assert liar.averager is not None
    averager = liar.averager
    make_round = averager._make_round

    def heavy(control: Any, group: Group, weight: float, *travels: Any) -> Any:
        liar.told.append("a huge weight")
        return make_round(control, group, MAX_WEIGHT, *travels)

    averager._make_round = heavy  # type: ignore[method-assign]


@lie("unlike weights", "parts", at_most="the lower median of what it named counts")
def unlike_weights(liar: Liar) -> None:
    """Each reducer is told another weight."""
    weight = 1.0

    async def alter(message: Any, payload: Any) -> tuple[Any, Any]:
        nonlocal weight
        if isinstance(message, SenderTerms):
            weight *= 1.01
            liar.told.append(f"the weight {weight}")
            message = msgspec.structs.replace(message, weight=weight)
        return message, payload

    as_sender(liar, alter)


@lie("false accusations", "parts", at_most="one signature to check; it is not listened to again")
def false_accusations(liar: Liar) -> None:
    """Whenever a try begins it accuses each member of signing unlike averages, with signatures that are none."""
    assert liar.averager is not None
    averager = liar.averager

    async def accuse(teller: PeerID, victim: PeerID, group_id: bytes) -> None:
        lists = [SignedAverages(liar.random.randbytes(32), liar.random.randbytes(64)) for _ in range(2)]
        evidence = UnlikeAverages(victim, averager.config.prefix, group_id, lists[0], lists[1])
        liar.told.append("a false accusation")
        try:
            message = ProofMessage(evidence)
            await liar.endpoint.call(teller, averager.trust.method, message, ProofTaken, timeout=5)
        except NetworkError as error:
            liar.told.append(f"refused: {error}")

    def on_try(round_: Any) -> None:
        members = [member.peer_id for member in round_.group.members if member.peer_id != liar.endpoint.peer_id]
        for hearer, victim in zip(members, members[1:] + members[:1], strict=True):
            averager._rounds.spawn(accuse(hearer, victim, round_.group.group_id))

    on_each_exchange(liar, on_try)


def keep_averages_from(member: int, service: AllreduceService) -> None:
    """A reducer that serves all but one."""
    host = service.host

    def altered(exchange: Any) -> None:
        serve = exchange._receiver.serve

        async def unless_it(index: int, stream: Stream) -> None:
            if index == member:
                raise CallRefused("no", "this one gets nothing")
            await serve(index, stream)

        exchange._receiver.serve = unless_it
        host(exchange)

    service.host = altered  # type: ignore[method-assign]
