"""Messages between nodes. The types carry the bounds: a message beyond them is not even decoded, and ends the
connection that it came on."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarmcli.dht.records import ID_BYTES, Record
from swarmcli.dht.routing import BUCKET_SIZE, Contact

PING = "dht.ping"
FIND = "dht.find"
STORE = "dht.store"
SYNC = "dht.sync"

MAX_RECORDS = 4096  # in one message, and keys compared in one

ID = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Neighbours = Annotated[tuple[Contact, ...], msgspec.Meta(max_length=BUCKET_SIZE)]
Records = Annotated[tuple[Record, ...], msgspec.Meta(max_length=MAX_RECORDS)]


class PingRequest(msgspec.Struct, frozen=True):
    """Are you there? `listening`, in all requests: whether the asker is a node that others may ask; if not, it stays
    out of routing tables. Its addresses were in its greeting."""

    listening: bool = False


class PingReply(msgspec.Struct, frozen=True):
    listening: bool


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """About one id. With a cursor: only records that the replica stored after it, if `instance` is still its own."""

    target: ID
    instance: int = 0
    cursor: int = 0


class FindRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Name the nodes that you know near this id, and (with `values`) the records that you hold under it."""

    listening: bool
    questions: tuple[Question]
    contacts: int = 0  # wanted
    values: bool = False
    room: int = 0  # bytes of records that the asker takes, though always one record; 0: as many as fit in a message


class FindAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Records in the order in which they were stored; `more` follow after `cursor`. The replica holds
    `count` under that id in all."""

    records: Records = ()
    cursor: int = 0
    more: bool = False
    count: int = 0


class FindReply(msgspec.Struct, frozen=True):
    instance: int  # drawn anew in each life of a node: cursors of another life mean nothing
    neighbours: Neighbours
    answers: Annotated[tuple[FindAnswer, ...], msgspec.Meta(max_length=1)]  # one with `values`, else none


class StoreRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    listening: bool
    records: Records  # of one key
    contacts: int = 0  # neighbours wanted, so that storing can be a step of the search for where to store


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    verdict: int
    current: Record | None = None  # for an owned record that was stale: the newer one, signed, so that it is believed


class StoreReply(msgspec.Struct, frozen=True, omit_defaults=True):
    outcomes: Annotated[tuple[Outcome, ...], msgspec.Meta(max_length=MAX_RECORDS)]  # one per record
    neighbours: Neighbours = ()


class SyncRequest(msgspec.Struct, frozen=True):
    """The asker holds this under these keys. A node that holds anything else asks for them."""

    listening: bool
    digests: Annotated[tuple[tuple[ID, int], ...], msgspec.Meta(max_length=MAX_RECORDS)]  # of each key's records


class SyncReply(msgspec.Struct, frozen=True):
    wanted: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_RECORDS)]
