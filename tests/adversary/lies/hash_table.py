"""Lies of the hash table: nodes that hide, invent, fill, repeat what is old, and ask without end."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from swarmcli.dht import messages
from swarmcli.dht.core import NodeCore
from swarmcli.dht.messages import FindAnswer, FindReply, FindRequest, Outcome, Question, StoreReply, StoreRequest
from swarmcli.dht.records import OwnedSubkey, Record, encode_subkey, encode_value, id_to_bytes, key_id, sign_record
from swarmcli.dht.routing import BUCKET_SIZE, Contact
from swarmcli.dht.storage import StoreVerdict
from swarmcli.errors import SwarmError
from swarmcli.network.identity import Identity, PeerID
from swarmcli.reach.relay_messages import RELAYS_KEY
from tests.adversary.lies.base import Liar, lie

_AGAIN = 20.0  # seconds between what a liar sends of its own accord
_PATIENCE = 10.0  # seconds that it waits for an answer
_LIFE = 80_000.0  # seconds that what it writes is to live
_THROWAWAYS = 400  # identities, one for each record


@lie("hides records", "hash table", at_most="a record is lost only where all of its replicas lie")
def hide(liar: Liar) -> None:
    """Says that it has stored, has nothing, and names nobody."""
    _store_nothing(liar)
    _answer(liar, messages.FIND, FindRequest, lambda peer, request: _nothing(request))


@lie("invents contacts", "hash table", at_most="a search dials six of them")
def invent(liar: Liar) -> None:
    """Hides, and names contacts near whatever is looked for that nobody is."""
    name_each_other([], invented=BUCKET_SIZE)(liar)


@lie("plays back old records", "hash table", at_most="nothing: readers take the newest that its owner has signed")
def play_back(liar: Liar) -> None:
    """Answers with the first version of each record that it has seen."""
    first: dict[tuple[int, bytes], Record] = {}

    def store(peer: PeerID, request: StoreRequest) -> StoreReply:
        for record in request.records:
            first.setdefault((key_id(record.key), record.subkey), record)
        return StoreReply((Outcome(int(StoreVerdict.STORED)),) * len(request.records))

    def find(peer: PeerID, request: FindRequest) -> FindReply:
        if not request.values:
            return _nothing(request)
        target = int.from_bytes(request.questions[0].target, "big")
        old = tuple(record for (number, _), record in first.items() if number == target)
        return FindReply(1, (), (FindAnswer(old, cursor=len(old)),))

    _answer(liar, messages.STORE, StoreRequest, store)
    _answer(liar, messages.FIND, FindRequest, find)


@lie("says that something newer is there", "hash table", at_most="nothing: what is newer counts with a signature")
def stale(liar: Liar) -> None:
    def store(peer: PeerID, request: StoreRequest) -> StoreReply:
        newer = [msgspec.structs.replace(record, sequence=(1 << 63) - 1) for record in request.records]
        return StoreReply(tuple(Outcome(int(StoreVerdict.STALE), record) for record in newer))

    _answer(liar, messages.STORE, StoreRequest, store)


@lie("answers without end", "hash table", at_most="one message; it is no contact for five minutes")
def endless(liar: Liar) -> None:
    def find(peer: PeerID, request: FindRequest) -> FindReply:
        answers = (FindAnswer((), cursor=1, more=True),) * request.values
        return FindReply(1, (), answers)

    _answer(liar, messages.FIND, FindRequest, find)


@lie("wants everything sent, every time", "hash table", at_most="each replica sends it each state of a key once")
def want_everything(liar: Liar) -> None:
    _store_nothing(liar)

    def sync(peer: PeerID, request: messages.SyncRequest) -> messages.SyncReply:
        return messages.SyncReply(tuple(number for number, _ in request.digests))

    _answer(liar, messages.SYNC, messages.SyncRequest, sync)


@lie("fills keys with throwaway identities", "hash table", at_most="its network's share of a key; nobody else's")
def fill_keys(liar: Liar) -> None:
    """Each record has an owner of its own; all that can be signed for is signed."""
    owners = [Identity.from_seed(liar.random.randbytes(32)) for _ in range(_THROWAWAYS)]

    records: dict[str, tuple[Record, ...]] = {}

    def made(key: str, until: float) -> tuple[Record, ...]:
        value = encode_value("x" * 64)
        blank = [Record(key, encode_subkey(OwnedSubkey(owner.peer_id)), value, until, sequence=1) for owner in owners]
        return tuple(sign_record(owner, record) for owner, record in zip(owners, blank, strict=True))

    async def fill(peer: PeerID) -> None:
        core = _core(liar)
        for key in _keys(core)[:2]:
            if key not in records:
                records[key] = made(key, core.now() + 900.0)
            await _tell(liar, peer, messages.STORE, StoreRequest(True, records[key]), StoreReply)

    _keep_telling(liar, fill)


@lie("fills the storage", "hash table", at_most="64 MiB of a node by one network")
def fill_storage(liar: Liar) -> None:
    async def fill(peer: PeerID) -> None:
        core = _core(liar)
        block = encode_value(liar.random.randbytes(100_000))
        records = [Record(f"{liar.random.random()}", encode_subkey(None), block, core.now() + _LIFE) for _ in range(8)]
        await _tell(liar, peer, messages.STORE, StoreRequest(True, tuple(records)), StoreReply)

    _keep_telling(liar, fill)


@lie("compares one key four thousand times", "hash table", at_most="its own budget of questions")
def compare(liar: Liar) -> None:
    async def ask(peer: PeerID) -> None:
        for key in _keys(_core(liar))[:1]:
            one = (id_to_bytes(key_id(key)), 1)
            request = messages.SyncRequest(True, (one,) * messages.MAX_RECORDS)
            await _tell(liar, peer, messages.SYNC, request, messages.SyncReply)

    _keep_telling(liar, ask)


@lie("asks without end", "hash table", at_most="its own budget of questions: 2.5 % of a core in the long run")
def ask_without_end(liar: Liar) -> None:
    async def ask(peer: PeerID) -> None:
        for _ in range(5000):
            question = Question(liar.random.randbytes(32))
            await _tell(liar, peer, messages.FIND, FindRequest(True, (question,), contacts=20), FindReply)

    _keep_telling(liar, ask)


@lie("stores a thousand relays that are none", "hash table", at_most="an eighth of the relays' key")
def invent_relays(liar: Liar) -> None:
    owners = [Identity.from_seed(liar.random.randbytes(32)) for _ in range(_THROWAWAYS)]
    until = _core(liar).now() + 900.0
    records = []
    for owner in owners:
        value = encode_value({"addresses": [_address(liar)], "load": 0.0})
        blank = Record(RELAYS_KEY, encode_subkey(OwnedSubkey(owner.peer_id)), value, until, sequence=1)
        records.append(sign_record(owner, blank))

    async def fill(peer: PeerID) -> None:
        await _tell(liar, peer, messages.STORE, StoreRequest(True, tuple(records)), StoreReply)

    _keep_telling(liar, fill)


def name_each_other(liars: Sequence[Contact], invented: int = 0) -> Callable[[Liar], None]:
    """A lie of several who know each other: each hides what it holds and names, of all nodes, only the nearest of
    `liars`, and before them so many contacts that it invents."""

    def tell(liar: Liar) -> None:
        _store_nothing(liar)

        def find(peer: PeerID, request: FindRequest) -> FindReply:
            target = int.from_bytes(request.questions[0].target, "big")
            fake = [_invented(liar, target) for _ in range(min(invented, request.contacts))]
            near = sorted(liars, key=lambda contact: contact.node ^ target)
            return _nothing(request, [*fake, *near][: request.contacts])

        _answer(liar, messages.FIND, FindRequest, find)

    return tell


# What they have in common


def _core(liar: Liar) -> NodeCore:
    if liar.node is None:
        raise ValueError("a lie of the hash table needs a node of it")
    return liar.node.core


def _answer(liar: Liar, method: str, request_type: type, handler: Callable[[PeerID, Any], Any]) -> None:
    """From now on this liar answers a method so."""
    liar.endpoint.withdraw(method)

    async def answer(peer: PeerID, request: Any) -> Any:
        liar.told.append(method)
        _core(liar).heard_from(peer, request.listening)
        return handler(peer, request)

    liar.endpoint.serve(method, request_type, answer)


def _nothing(request: FindRequest, neighbours: Sequence[Contact] = ()) -> FindReply:
    return FindReply(1, tuple(neighbours), (FindAnswer(),) * request.values)


def _store_nothing(liar: Liar) -> None:
    def store(peer: PeerID, request: StoreRequest) -> StoreReply:
        return StoreReply((Outcome(int(StoreVerdict.STORED)),) * len(request.records))

    _answer(liar, messages.STORE, StoreRequest, store)
    _answer(liar, messages.SYNC, messages.SyncRequest, lambda peer, request: messages.SyncReply(()))


def _keys(core: NodeCore) -> list[str]:
    """Keys that this liar was trusted with, and one that everybody has."""
    held = [core.storage.records(number) for number in core.storage.keys(core.now())]
    return [*dict.fromkeys(records[0].key for records in held), RELAYS_KEY]


def _keep_telling(liar: Liar, tell: Callable[[PeerID], Awaitable[None]]) -> None:
    """Does so to everyone whom it knows or is connected with, again and again until its endpoint closes."""

    async def keep() -> None:
        while True:
            known = [contact.peer_id for contact in _core(liar).contacts.table]
            for peer in dict.fromkeys([*liar.endpoint.connected(), *known]):
                with suppress(SwarmError):
                    await tell(peer)
            await asyncio.sleep(_AGAIN)

    liar.endpoint._context.tasks.spawn(keep())


async def _tell(liar: Liar, peer: PeerID, method: str, request: Any, reply: type) -> None:
    liar.told.append(method)
    await liar.endpoint.call(peer, method, request, reply, timeout=_PATIENCE)


def _address(liar: Liar) -> str:
    return f"tcp://{liar.random.randrange(20, 100)}.{liar.random.randrange(256)}.1.1:9"


def _invented(liar: Liar, target: int) -> Contact:
    """Near the target: an id that nobody has the key of costs a hash, so the liar takes the best of some."""
    drawn = [PeerID(liar.random.randbytes(32)) for _ in range(64)]
    nearest = min(drawn, key=lambda peer: int.from_bytes(hashlib.sha256(peer).digest(), "big") ^ target)
    return Contact(nearest, (_address(liar),))
