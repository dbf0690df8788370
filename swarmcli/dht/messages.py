"""What nodes say to each other. Every list is bounded by `check_…` before it is used; see docs/protocol.md."""

from __future__ import annotations

import msgspec

from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.records import ID_BYTES, Record
from swarmcli.dht.routing import Contact
from swarmcli.errors import ValidationError
from swarmcli.network.identity import PeerID

PING = "dht.ping"
FIND = "dht.find"
STORE = "dht.store"
SYNC = "dht.sync"


class PingRequest(msgspec.Struct, frozen=True):
    """Are you there? `addresses` are the asker's own; none in client mode, and then it stays out of routing tables."""

    addresses: tuple[str, ...] = ()


class PingReply(msgspec.Struct, frozen=True):
    addresses: tuple[str, ...]


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """About one id. With a cursor only what this life of the replica has stored after it is wanted."""

    target: bytes
    instance: int = 0
    cursor: int = 0


class FindRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whom do you know near these ids, and (with `values`) what do you hold under them?"""

    addresses: tuple[str, ...]
    questions: tuple[Question, ...]
    contacts: int = 0  # wanted per question
    values: bool = False


class Neighbour(msgspec.Struct, frozen=True):
    peer_id: PeerID
    addresses: tuple[str, ...]


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Records of one question in the order in which they were stored; `more` follow after `cursor`."""

    records: tuple[Record, ...] = ()
    cursor: int = 0
    more: bool = False


class FindReply(msgspec.Struct, frozen=True):
    instance: int  # drawn anew in each life of a node: cursors of another life mean nothing
    neighbours: tuple[Neighbour, ...]  # near any of the questions
    answers: tuple[Answer, ...]  # one per question if values were asked for


class StoreRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    addresses: tuple[str, ...]
    records: tuple[Record, ...]
    contacts: int = 0  # neighbours wanted per key, so that storing can be a step of the search for where to store


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    verdict: int
    current: Record | None = None  # for an owned record that was stale: the newer one, signed, so that it is believed


class StoreReply(msgspec.Struct, frozen=True, omit_defaults=True):
    outcomes: tuple[Outcome, ...]  # one per record
    neighbours: tuple[Neighbour, ...] = ()


class SyncRequest(msgspec.Struct, frozen=True):
    """What the asker holds under these keys; whoever holds anything else wants them sent."""

    addresses: tuple[str, ...]
    digests: tuple[tuple[bytes, int], ...]  # (key id, digest of its records)


class SyncReply(msgspec.Struct, frozen=True):
    wanted: tuple[bytes, ...]


def contact_from(peer_id: PeerID, addresses: tuple[str, ...], limits: DHTLimits) -> Contact:
    """A contact as somebody described it. ValidationError beyond the bounds."""
    if len(addresses) > limits.max_addresses or any(len(address) > limits.max_address for address in addresses):
        raise ValidationError(f"a peer has at most {limits.max_addresses} addresses of {limits.max_address} characters")
    return Contact(peer_id, addresses)


def check_ids(ids: tuple[bytes, ...], most: int) -> None:
    """ValidationError unless these are at most `most` ids of the right length."""
    if len(ids) > most:
        raise ValidationError(f"a message has at most {most} ids")
    if any(len(number) != ID_BYTES for number in ids):
        raise ValidationError(f"an id has {ID_BYTES} bytes")


def contacts_in(neighbours: tuple[Neighbour, ...], most: int, limits: DHTLimits) -> list[Contact]:
    """The contacts that a reply names. ValidationError if there are more than `most` or one is impossible."""
    if len(neighbours) > min(limits.max_contacts, most):
        raise ValidationError("more neighbours than were asked for")
    if any(not neighbour.addresses for neighbour in neighbours):
        raise ValidationError("a neighbour without an address")
    return [contact_from(neighbour.peer_id, neighbour.addresses, limits) for neighbour in neighbours]


def check_answers(reply: FindReply, request: FindRequest, limits: DHTLimits) -> None:
    """ValidationError if the answers to this request may not look like this."""
    if len(reply.answers) != (len(request.questions) if request.values else 0):
        raise ValidationError("as many answers as questions were expected")
    if sum(len(answer.records) for answer in reply.answers) > limits.max_records:
        raise ValidationError(f"a message has at most {limits.max_records} records")
