"""Peers that lie, flood, and answer nonsense: each is named and counted, and everyone else goes on."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from swarmcli.dht import DHTLimits, DHTNode, messages
from swarmcli.dht.messages import FindAnswer, FindReply, FindRequest, Outcome, StoreReply
from swarmcli.dht.records import (
    NO_SUBKEY,
    OwnedSubkey,
    Record,
    encode_subkey,
    encode_value,
    id_to_bytes,
    key_id,
    node_id,
    sign_record,
)
from swarmcli.dht.routing import BUCKET_SIZE, Contact
from swarmcli.dht.storage import StoreVerdict
from swarmcli.errors import CallRefused, ConnectionLost
from swarmcli.events import PeerRefused
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.reach.relay_messages import RELAYS_KEY
from tests.simulation import simulated

from .swarm import Swarm, address, identity, soon

Find = Callable[[FindRequest], Any]


async def liar(swarm: Swarm, find: Find, store: Callable[..., Any] | None = None) -> Endpoint:
    """Says that it is a node, and answers as it likes. Every node of the swarm has heard of it."""
    endpoint = await swarm.endpoint("liar")

    async def ping(peer: PeerID, request: messages.PingRequest) -> messages.PingReply:
        return messages.PingReply(True)

    async def answer(peer: PeerID, request: FindRequest) -> Any:
        reply = find(request)
        return await reply if inspect.isawaitable(reply) else reply

    async def keep(peer: PeerID, request: messages.StoreRequest) -> Any:
        return store(request) if store is not None else StoreReply((Outcome(0),) * len(request.records), ())

    endpoint.serve(messages.PING, messages.PingRequest, ping)
    endpoint.serve(messages.FIND, FindRequest, answer)
    endpoint.serve(messages.STORE, messages.StoreRequest, keep)
    for node in [node for node in swarm.nodes if not node.client_mode]:
        await endpoint.connect(address(node), timeout=5.0)
        request = messages.PingRequest(True)
        await endpoint.call(node.peer_id, messages.PING, request, messages.PingReply, timeout=5.0)
    return endpoint


def nothing(request: FindRequest) -> FindReply:
    return FindReply(1, (), (FindAnswer(),) * request.values)


class WrongKind(msgspec.Struct):
    nonsense: list[int]


def neighbours(count: int, addresses: tuple[str, ...] = ("memory://absent",)) -> tuple[Contact, ...]:
    return tuple(Contact(identity(f"invented {number}").peer_id, addresses) for number in range(count))


def endless(request: FindRequest) -> FindAnswer:
    """Ever more subkeys, page by page."""
    page = request.questions[0].cursor
    names = (f"{page} {number}" for number in range(1000))
    records = tuple(Record("key", encode_subkey(name), b"\x01", 1_700_000_500.0) for name in names)
    return FindAnswer(records, page + 1, more=True)


MALFORMED: dict[str, Find] = {
    "another type": lambda request: WrongKind([1]),
    "too many neighbours": lambda request: FindReply(1, neighbours(200), nothing(request).answers),
    "too many addresses": lambda request: FindReply(1, neighbours(1, ("memory://a",) * 65), nothing(request).answers),
    "too few answers": lambda request: FindReply(1, (), ()),
    "no end": lambda request: FindReply(1, (), (FindAnswer(cursor=1, more=True),)),
    "no end of records": lambda request: FindReply(1, (), (endless(request),)),
}


@pytest.mark.parametrize("kind", MALFORMED)
@simulated
async def test_malformed_answers_are_counted_and_the_search_goes_on(kind: str) -> None:
    async with Swarm() as swarm:
        nodes = await swarm.grow(3)
        heard: list[Any] = []
        nodes[1].endpoint.events.subscribe(heard.append)
        endpoint = await liar(swarm, MALFORMED[kind])
        assert endpoint.peer_id in nodes[1].core.contacts.table
        await nodes[0].store("key", 1, soon(nodes[0]))
        assert (await nodes[1].get("key", latest=True)).value == 1  # type: ignore[union-attr]
        refusals = [event for event in heard if isinstance(event, PeerRefused)]
        assert {event.peer for event in refusals} == {endpoint.peer_id.text}
        assert endpoint.peer_id not in nodes[1].core.contacts.table, "whoever talks nonsense is no contact"


@simulated
async def test_whoever_only_asks_and_is_named_to_itself_does_not_call_itself() -> None:
    async with Swarm() as swarm:
        await swarm.grow(2)
        victim = await swarm.node("victim", client_mode=True)

        def find(request: FindRequest) -> FindReply:
            lie = (Contact(victim.peer_id, ("memory://203.0.113.9",)),) if request.contacts else ()
            return msgspec.structs.replace(nothing(request), neighbours=lie)

        await liar(swarm, find)
        assert await victim.store("key", 1, soon(victim), subkey="name")
        assert list((await victim.get("key", latest=True)).value) == ["name"]  # type: ignore[union-attr]
        assert list(await victim.follow("key").refresh()) == ["name"]


def forged(**changes: Any) -> Find:
    """Answers with a record of somebody's, changed after it was signed."""
    owner = identity("owner")
    subkey = encode_subkey(OwnedSubkey(owner.peer_id))

    def find(request: FindRequest) -> FindReply:
        if not request.values:
            return nothing(request)
        record = sign_record(owner, Record("key", subkey, encode_value("true"), 1_700_000_500.0, sequence=5))
        answer = FindAnswer((msgspec.structs.replace(record, **changes),), cursor=1)
        return FindReply(1, (), (answer,))

    return find


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"value": encode_value("forged")}, "signature"),
        ({"sequence": 6}, "signature"),
        ({"key": "another"}, "bounds"),
        ({"expiration": 1e12}, "bounds"),
        ({"value": b"\xc1"}, "bounds"),
    ],
)
@simulated
async def test_records_that_do_not_count_are_dropped_on_reading(changes: dict[str, Any], rule: str) -> None:
    async with Swarm() as swarm:
        nodes = await swarm.grow(2)
        endpoint = await liar(swarm, forged(**changes))
        heard: list[Any] = []
        nodes[0].endpoint.events.subscribe(heard.append)
        await nodes[1].store("key", "honest", soon(nodes[1]), subkey="honest")
        found = await nodes[0].get("key", latest=True)
        assert found is not None and list(found.value) == ["honest"]
        (refusal,) = [event for event in heard if isinstance(event, PeerRefused)]
        assert refusal.peer == endpoint.peer_id.text and rule in refusal.reason


@simulated
async def test_an_old_record_played_back_changes_nothing() -> None:
    """The signature is good; only the number is lower than the owner's last."""

    async with Swarm() as swarm:
        reader = await swarm.node("reader")
        owner = await swarm.node("owner")
        mine = owner.own_subkey()
        await owner.store("key", "old", soon(owner, 900.0), subkey=mine)
        old = reader.core.storage.records(key_id("key"))[0]
        await owner.store("key", "new", soon(owner, 100.0), subkey=mine)
        stranger = await swarm.stranger(reader)
        outcome = await store(stranger, reader, old)
        assert outcome.verdict == StoreVerdict.STALE
        await owner.withdraw("key", mine)
        assert (await store(stranger, reader, old)).verdict == StoreVerdict.STALE
        assert await reader.get("key", latest=True) is None


async def store(stranger: Endpoint, node: DHTNode, record: Record) -> Outcome:
    request = messages.StoreRequest(False, (record,))
    reply = await stranger.call(node.peer_id, messages.STORE, request, StoreReply, timeout=5.0)
    return reply.outcomes[0]


@simulated
async def test_large_values_are_charged_by_the_work_of_reading_them() -> None:
    async with Swarm() as swarm:
        node = await swarm.node("node", limits=DHTLimits(work_burst=1100.0))
        stranger = await swarm.stranger(node)
        for value, allowed in (([[]] * 125_000, 2), (b"x" * 125_000, 4), (1, 4)):
            records = [Record(f"{allowed} {n}", NO_SUBKEY, encode_value(value), soon(node)) for n in range(4)]
            verdicts = [(await store(stranger, node, record)).verdict for record in records]
            assert verdicts == [StoreVerdict.STORED] * allowed + [StoreVerdict.BUSY] * (4 - allowed)


@simulated
async def test_nobody_takes_anothers_subkey() -> None:
    async with Swarm() as swarm:
        node = await swarm.node("node")
        stranger = await swarm.stranger(node)
        subkey = encode_subkey(OwnedSubkey(node.peer_id))
        unsigned = Record("key", subkey, encode_value(1), soon(node), sequence=1, signature=b"x" * 64)
        assert (await store(stranger, node, unsigned)).verdict == StoreVerdict.REFUSED
        plain = Record("key", encode_subkey("a"), encode_value(1), soon(node), sequence=1 << 62)
        assert (await store(stranger, node, plain)).verdict == StoreVerdict.REFUSED
        assert node.core.storage.count() == 0


@simulated
async def test_an_invented_newer_record_does_not_mislead_its_owner() -> None:
    """A replica that says "stale" must show the newer record; a forged one would exhaust the owner's numbers."""

    async with Swarm() as swarm:
        nodes = await swarm.grow(3)

        def stale(request: messages.StoreRequest) -> StoreReply:
            record = msgspec.structs.replace(request.records[0], sequence=(1 << 63) - 1)
            return StoreReply((Outcome(int(StoreVerdict.STALE), record),) * len(request.records), ())

        await liar(swarm, nothing, stale)
        mine = nodes[0].own_subkey()
        for number in range(3):
            assert await nodes[0].store("key", number, soon(nodes[0]), subkey=mine)
        (kept,) = nodes[0].core.storage.records(key_id("key"))
        assert kept.sequence < 1 << 60
        assert (await nodes[1].get("key", latest=True)).value[mine].value == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("method", "request_", "reply"),
    [
        (messages.FIND, FindRequest(False, (messages.Question(b"short"),)), FindReply),
        (messages.FIND, FindRequest(False, (messages.Question(id_to_bytes(1)),) * 2), FindReply),  # type: ignore[arg-type]
        (messages.PING, messages.PingRequest(5), messages.PingReply),  # type: ignore[arg-type]
        (messages.STORE, messages.StoreRequest(False, (), contacts="x"), StoreReply),  # type: ignore[arg-type]
    ],
)
@simulated
async def test_impossible_requests_end_their_connection(method: str, request_: Any, reply: type) -> None:
    async with Swarm() as swarm:
        node = await swarm.node("node")
        stranger = await swarm.stranger(node)
        with pytest.raises(ConnectionLost, match="unreadable message"):
            await stranger.call(node.peer_id, method, request_, reply, timeout=5.0)
        assert node.endpoint.statistics().violations == {"unreadable message": 1}


@simulated
async def test_a_reply_stays_within_its_bounds_whatever_is_asked() -> None:
    async with Swarm() as swarm:
        nodes = await swarm.grow(8)
        limits = DHTLimits()
        names = [f"{number}" for number in range(30)]
        await nodes[0].store_many(["key"] * 30, [b"x" * 100_000] * 30, soon(nodes[0]), names)
        holder = next(node for node in nodes if node.core.storage.count())
        stranger = await swarm.stranger(holder)
        question = messages.Question(id_to_bytes(key_id("key")))
        request = FindRequest(False, (question,), contacts=10**9, values=True)
        reply = await stranger.call(holder.peer_id, messages.FIND, request, FindReply, timeout=5.0)
        (answer,) = reply.answers
        assert 0 < sum(record.size for record in answer.records) <= limits.max_reply and answer.more
        assert len(reply.neighbours) <= BUCKET_SIZE


@simulated
async def test_values_of_the_relays_key_are_no_larger_than_relays_have_them() -> None:
    async with Swarm() as swarm:
        node = await swarm.node("node")
        assert await node.store(RELAYS_KEY, ["x" * 500] * 8, soon(node), node.own_subkey())
        assert not await node.store(RELAYS_KEY, [[]] * 9000, soon(node, 2000.0), node.own_subkey())


@simulated
async def test_whoever_makes_up_records_without_end_does_not_fill_a_readers_memory() -> None:
    """Each reading of a follower within the bounds of one, and honest records beside it."""
    limits = DHTLimits(max_subkeys=64, max_entry=64_000)
    made = 0

    def find(request: FindRequest) -> FindReply:
        nonlocal made
        names = [f"{number}" for number in range(made, made + 60)]
        made += len(names)
        records = tuple(Record("key", encode_subkey(name), encode_value(name * 50), 1_700_000_500.0) for name in names)
        return FindReply(1, (), (FindAnswer(records, cursor=made),) * request.values)

    async def compare(peer: PeerID, request: messages.SyncRequest) -> messages.SyncReply:
        return messages.SyncReply(())

    async with Swarm() as swarm:
        nodes = await swarm.grow(3, limits=limits)
        endpoint = await liar(swarm, find)
        endpoint.serve(messages.SYNC, messages.SyncRequest, compare)
        follower = nodes[0].follow("key")
        for turn in range(20):
            await nodes[1].store("key", turn, soon(nodes[1]), nodes[1].own_subkey())
            found = await follower.refresh()
            assert found[nodes[1].own_subkey()].value == turn
            assert len(found) <= limits.max_subkeys + 1
            await asyncio.sleep(1.0)
        assert made > 10 * limits.max_subkeys


@simulated
async def test_a_replica_that_wants_everything_each_time_is_sent_a_state_of_a_key_once() -> None:
    sent = compared = 0

    def keep(request: messages.StoreRequest) -> StoreReply:
        nonlocal sent
        sent += len(request.records)
        return StoreReply((Outcome(int(StoreVerdict.STORED)),) * len(request.records))

    async def want_all(peer: PeerID, request: messages.SyncRequest) -> messages.SyncReply:
        nonlocal compared
        compared += 1
        return messages.SyncReply(tuple(number for number, _ in request.digests))

    async with Swarm() as swarm:
        (node,) = await swarm.grow(1, limits=DHTLimits(sync_interval=10.0))
        endpoint = await liar(swarm, nothing, keep)
        endpoint.serve(messages.SYNC, messages.SyncRequest, want_all)
        await node.store("key", 1, soon(node, 900.0))
        await asyncio.sleep(100.0)
        assert compared > 5 and 0 < sent <= 2, "as it was written, and in the first comparison"


@simulated
async def test_a_replica_that_trickles_its_records_holds_no_reader_for_long() -> None:
    """One record a page, and each page after a pause that no call takes for silence."""
    pages = 0

    async def find(request: FindRequest) -> FindReply:
        nonlocal pages
        if not request.values:
            return nothing(request)
        pages += 1
        await asyncio.sleep(1.8)
        record = Record("key", encode_subkey(f"{pages}"), encode_value(pages), 1_700_000_500.0)
        return FindReply(1, (), (FindAnswer((record,), pages, more=True),))

    async with Swarm() as swarm:
        nodes = await swarm.grow(3)
        endpoint = await liar(swarm, find)
        await nodes[1].store("key", 1, soon(nodes[1]), subkey="honest")
        loop = asyncio.get_running_loop()
        for read in (nodes[0].follow("key").refresh, lambda: nodes[2].get("key", latest=True)):
            begun = loop.time()
            found = await read()
            assert "honest" in (found if isinstance(found, dict) else found.value)
            assert loop.time() - begun < 10.0
        assert endpoint.peer_id not in nodes[0].core.contacts.table


@simulated
async def test_a_peer_that_claims_a_false_address_does_not_stay_a_contact() -> None:
    async with Swarm() as swarm:
        nodes = await swarm.grow(2)
        stranger = await swarm.endpoint("stranger")
        stranger.announce(direct=["memory://absent"])
        await stranger.connect(address(nodes[0]), timeout=5.0)
        request = messages.PingRequest(True)
        await stranger.call(nodes[0].peer_id, messages.PING, request, messages.PingReply, timeout=5.0)
        assert stranger.peer_id in nodes[0].core.contacts.table
        await nodes[0].get("key", latest=True)
        assert stranger.peer_id not in nodes[0].core.contacts.table


@simulated
async def test_a_peer_that_never_answers_slows_nobody_down_for_long() -> None:
    async with Swarm() as swarm:
        nodes = await swarm.grow(8)
        for frozen in nodes[5:7]:
            swarm.network.freeze(frozen.peer_id)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for number in range(5):
            assert await nodes[0].store(f"key {number}", number, soon(nodes[0]))
            assert (await nodes[1].get(f"key {number}", latest=True)).value == number  # type: ignore[union-attr]
        assert loop.time() - begun < 8.0
        for frozen in nodes[5:7]:
            swarm.network.thaw(frozen.peer_id)


@simulated
async def test_what_others_say_of_a_node_is_not_handed_on_as_its_own_word() -> None:
    """The liar says of an honest node that it is elsewhere, too; who can reach that node anyway must not repeat it."""

    async with Swarm() as swarm:
        nodes = await swarm.grow(3)
        honest, lie = nodes[2], ("memory://absent", nodes[2].endpoint.addresses[0])
        named = (Contact(honest.peer_id, lie),)
        await liar(swarm, lambda request: FindReply(1, named, nothing(request).answers))
        for node in nodes[:2]:
            node.endpoint.learn(honest.peer_id, lie)
            await node.get("key", latest=True)
            await node.core.explore(node_id(honest.peer_id))
            contact = node.core.contacts.table.get(honest.peer_id)
            assert contact is not None and contact.addresses == honest.endpoint.addresses
            assert "memory://absent" not in [each.rpartition("/")[0] for each in node.known_addresses()]


@pytest.mark.parametrize("method", [messages.SYNC, messages.FIND])
@simulated
async def test_who_asks_too_much_is_refused_and_nobody_else_is(method: str) -> None:
    async with Swarm() as swarm:
        node = await swarm.node("node", limits=DHTLimits(work_per_second=6.0, work_burst=300.0))
        request: Any = FindRequest(False, (messages.Question(id_to_bytes(1)),))
        if method == messages.SYNC:
            request = messages.SyncRequest(False, ((id_to_bytes(1), 1),) * 500)
        reply = FindReply if method == messages.FIND else messages.SyncReply
        greedy, modest = [await swarm.stranger(node, name) for name in ("greedy", "modest")]
        with pytest.raises(CallRefused, match="too much"):
            for _ in range(1000):
                await greedy.call(node.peer_id, method, request, reply, timeout=5.0)
        await modest.call(node.peer_id, method, request, reply, timeout=5.0)
        await asyncio.sleep(10.0)
        await greedy.call(node.peer_id, method, request, reply, timeout=5.0)
