"""Asking other nodes: one method per message, with its deadline, its bounds, and what a failure says of the contact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from swarmcli.dht import messages
from swarmcli.dht.core import NodeCore
from swarmcli.dht.lookup import Lookup
from swarmcli.dht.messages import FindReply, FindRequest, PingReply, PingRequest, Question
from swarmcli.dht.records import Record, id_to_bytes
from swarmcli.dht.routing import Contact
from swarmcli.errors import CallRefused, ConnectionLost, NetworkError, ProtocolViolation, RemoteError, ValidationError
from swarmcli.network.addresses import PeerInfo
from swarmcli.network.identity import PeerID

Reply = TypeVar("Reply", bound=msgspec.Struct)

_SLOW_LINK = 64 << 10  # bytes per second
_SHORTEST_TIMEOUT = 2.0  # seconds; a busy machine is not a dead one


class DHTClient:
    """All raise NetworkError when there is no answer and ValidationError when there is an impossible one.

    Either way the contact has left the routing table by then, unless it only said no.
    """

    def __init__(self, core: NodeCore) -> None:
        self._core = core

    async def ping(self, peer: PeerID) -> Contact | None:
        """The contact as it describes itself; None for a peer in client mode."""
        reply = await self._call(peer, messages.PING, PingRequest(self._core.addresses), PingReply)
        contact = messages.contact_from(peer, reply.addresses, self._core.limits)
        self._core.contacts.heard_from(contact, self._core.loop_time())
        return contact if contact.addresses else None

    async def find(
        self, contact: Contact, questions: Sequence[Question], *, contacts: int, values: bool
    ) -> tuple[FindReply, list[Contact]]:
        """One message with at most `max_targets` questions; also the neighbours that the answer names."""
        limits = self._core.limits
        request = FindRequest(self._core.addresses, tuple(questions), contacts, values)
        reply = await self._ask(contact, messages.FIND, request, FindReply)
        try:
            messages.check_answers(reply, request, limits)
            found = messages.contacts_in(reply.neighbours, contacts * len(questions), limits)
        except ValidationError as error:
            raise self.malformed(contact.peer_id, str(error)) from None
        return reply, found

    async def find_nodes(self, contact: Contact, lookups: Sequence[Lookup], count: int) -> list[Contact]:
        """Whom this contact knows near the targets of the lookups."""
        found: list[Contact] = []
        most = self._core.limits.max_targets
        for start in range(0, len(lookups), most):
            questions = [Question(id_to_bytes(lookup.target)) for lookup in lookups[start : start + most]]
            _, neighbours = await self.find(contact, questions, contacts=count, values=False)
            found.extend(neighbours)
        return found

    async def store(
        self, contact: Contact, records: Sequence[Record], *, contacts: int = 0
    ) -> tuple[Sequence[messages.Outcome], list[Contact]]:
        """One outcome per record, and neighbours of their keys. The caller keeps within bounds, see `batches`."""
        request = messages.StoreRequest(self._core.addresses, tuple(records), contacts)
        reply = await self._ask(contact, messages.STORE, request, messages.StoreReply)
        try:
            if len(reply.outcomes) != len(records):
                raise ValidationError("as many outcomes as records were expected")
            found = messages.contacts_in(reply.neighbours, contacts * len(records), self._core.limits)
        except ValidationError as error:
            raise self.malformed(contact.peer_id, str(error)) from None
        return reply.outcomes, found

    async def sync(self, contact: Contact, digests: Sequence[tuple[bytes, int]]) -> set[bytes]:
        """Under which of these keys the contact holds something else than this node."""
        request = messages.SyncRequest(self._core.addresses, tuple(digests))
        reply = await self._ask(contact, messages.SYNC, request, messages.SyncReply)
        return set(reply.wanted)

    def malformed(self, peer: PeerID, reason: str) -> ValidationError:
        """Counts and names an impossible answer and drops the contact; the caller raises what is returned."""
        self._core.contacts.ban(peer, self._core.loop_time())
        self._core.impossible(peer, reason)
        return ValidationError(reason)

    async def _ask(self, contact: Contact, method: str, request: msgspec.Struct, reply: type[Reply]) -> Reply:
        """Like `_call`; a contact known from hearsay is a contact from now on, since it has answered."""
        endpoint = self._core.endpoint
        if self._core.contacts.is_banned(contact.peer_id, self._core.loop_time()):
            raise ValidationError("the peer has sent impossible messages")
        if not endpoint.can_reach(contact.peer_id):
            endpoint.learn(PeerInfo(contact.peer_id, contact.addresses))
        answer = await self._call(contact.peer_id, method, request, reply)
        self._core.contacts.heard_from(contact, self._core.loop_time())
        return answer

    async def _call(self, peer: PeerID, method: str, request: msgspec.Struct, reply: type[Reply]) -> Reply:
        try:
            return await self._persistently(peer, method, request, reply)
        except (CallRefused, RemoteError):
            raise
        except NetworkError:
            self._core.contacts.gone(peer, self._core.loop_time())
            raise

    async def _persistently(self, peer: PeerID, method: str, request: msgspec.Struct, reply: type[Reply]) -> Reply:
        """A call that was lost with its connection is made once more on a new one: asking or storing twice is the
        same as once, and a connection may end because the peer gave it up for another."""
        call = self._core.endpoint.call
        timeout = self._timeout(peer, request)
        try:
            return await call(peer, method, request, reply, timeout=timeout)
        except ProtocolViolation:
            raise
        except ConnectionLost:
            return await call(peer, method, request, reply, timeout=timeout)

    def _timeout(self, peer: PeerID, request: msgspec.Struct) -> float:
        """Ten measured round trips, within bounds, and time for the way of what is sent over a slow link."""
        longest = self._core.limits.call_timeout
        measured = self._core.endpoint.round_trip(peer)
        patience = longest if measured is None else min(longest, max(_SHORTEST_TIMEOUT, 10 * measured))
        if isinstance(request, messages.StoreRequest):
            patience += sum(record.size for record in request.records) / _SLOW_LINK
        return patience


def batches(records: Sequence[Record], most_bytes: int, most_records: int) -> list[list[Record]]:
    """Cuts records into messages within bounds, in order."""
    result: list[list[Record]] = []
    size = 0
    for record in records:
        if not result or size + record.size > most_bytes or len(result[-1]) >= most_records:
            result.append([])
            size = 0
        result[-1].append(record)
        size += record.size
    return result
