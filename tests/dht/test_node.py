"""What a user of a node sees: storing, reading, subkeys, owners, batches, client mode, bounds."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pydantic
import pytest

from swarmcli.dht import DHTLimits, storage
from swarmcli.dht.records import Record, encode_subkey
from swarmcli.dht.schema import SchemaValidator
from tests.simulation import simulated

from .swarm import Swarm, soon


@simulated
async def test_what_one_peer_stores_every_other_reads() -> None:
    async with Swarm() as swarm:
        nodes = await swarm.grow(12)
        expiration = soon(nodes[0])
        assert await nodes[3].store("key", {"loss": 0.5, "tags": [1, None, b"x"]}, expiration)
        for node in nodes:
            assert await node.get("key") == ({"loss": 0.5, "tags": [1, None, b"x"]}, expiration)
            assert await node.get("another") is None
        holders = [node for node in nodes if node.core.storage.count()]
        assert len(holders) == 5


@simulated
async def test_subkeys_of_many_writers_merge_into_one_dictionary() -> None:
    async with Swarm() as swarm:
        nodes = await swarm.grow(8)
        for number, node in enumerate(nodes):
            assert await node.store("key", number, soon(node, 100.0 + number), subkey=f"peer {number}")
        assert await nodes[0].store("key", "bytes", soon(nodes[0], 50.0), subkey=b"peer 0")
        assert await nodes[0].store("key", "number", soon(nodes[0], 50.0), subkey=7)
        found = await nodes[5].get("key", latest=True)
        assert found is not None
        assert {name: item.value for name, item in found.value.items()} == {
            **{f"peer {number}": number for number in range(8)},
            b"peer 0": "bytes",
            7: "number",
        }
        assert found.expiration_time == found.value["peer 7"].expiration_time


@simulated
async def test_the_later_expiration_wins_and_the_earlier_is_refused() -> None:
    async with Swarm() as swarm:
        first, second = await swarm.grow(2)
        now = soon(first, 0.0)
        assert await first.store("key", "old", now + 10)
        assert await second.store("key", "new", now + 20)
        assert not await first.store("key", "late", now + 15)
        assert not await first.store("key", "expired", now - 1)
        assert (await first.get("key", latest=True)).value == "new"  # type: ignore[union-attr]


@simulated
async def test_expired_values_are_not_found() -> None:
    async with Swarm() as swarm:
        first, second = await swarm.grow(2)
        await first.store("key", 1, soon(first, 5.0), subkey="short")
        await first.store("key", 2, soon(first, 15.0), subkey="long")
        await asyncio.sleep(6.0)
        assert list((await second.get("key", latest=True)).value) == ["long"]  # type: ignore[union-attr]
        await asyncio.sleep(10.0)
        assert await second.get("key") is None and await second.get("key", latest=True) is None
        assert first.core.storage.count() == 0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"key": 5}, TypeError, "key is a str"),
        ({"key": "k" * 600}, ValueError, "key has 600 bytes"),
        ({"value": object()}, TypeError, "value cannot be stored"),
        ({"value": b"v" * 200_000}, ValueError, "value has 200005 bytes"),
        ({"subkey": 1.5}, TypeError, "str, bytes, int or OwnedSubkey"),
        ({"subkey": "s" * 300}, ValueError, "subkey has 303 bytes"),
        ({"expiration_time": math.nan}, ValueError, "nan"),
    ],
)
@simulated
async def test_what_cannot_be_stored_is_named(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    async with Swarm() as swarm:
        node = await swarm.node("one")
        with pytest.raises(error, match=words):
            await node.store(**{"key": "key", "value": 1, "expiration_time": soon(node)} | arguments)


@simulated
async def test_many_keys_are_stored_and_read_at_once() -> None:
    async with Swarm() as swarm:
        nodes = await swarm.grow(10)
        keys = [f"key {number}" for number in range(60)]
        assert await nodes[4].store_many(keys, list(range(60)), soon(nodes[4])) == dict.fromkeys(keys, True)
        found = await nodes[7].get_many([*keys, "missing"], latest=True)
        assert [item.value for item in found.values() if item is not None] == list(range(60))
        assert found["missing"] is None


@simulated
async def test_answers_too_long_for_one_message_come_in_pages() -> None:
    async with Swarm() as swarm:
        limits = DHTLimits(max_reply=20_000)
        first, second = await swarm.grow(2, limits=limits)
        names = [f"{number}" for number in range(120)]
        stored = await first.store_many(["key"] * 120, ["x" * 1000] * 120, soon(first), names)
        assert all(stored.values())
        found = await second.get("key", latest=True)
        assert found is not None and set(found.value) == set(names)
        other = await swarm.node("reader", client_mode=True, limits=limits)
        assert set((await other.get("key")).value) == set(names)  # type: ignore[union-attr]


@simulated
async def test_only_the_owner_writes_an_owned_subkey_and_can_withdraw_it() -> None:
    async with Swarm() as swarm:
        first, second, third = await swarm.grow(3)
        mine = first.own_subkey(b"progress")
        assert await first.store("key", "one", soon(first, 500.0), subkey=mine)
        assert await first.store("key", "two", soon(first, 100.0), subkey=mine), "the number counts, not the time"
        assert await second.store("key", "other", soon(second), subkey="plain")
        found = await third.get("key", latest=True)
        assert found is not None and found.value[mine].value == "two"
        assert await first.withdraw("key", mine)
        assert list((await third.get("key", latest=True)).value) == ["plain"]  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="only its owner"):
            await second.withdraw("key", mine)
        assert await first.store("key", "again", soon(first), subkey=mine)
        assert (await third.get("key", latest=True)).value[mine].value == "again"  # type: ignore[union-attr]


@pytest.mark.parametrize("withdraws", [False, True])
@simulated
async def test_an_owner_who_starts_anew_outranks_his_earlier_life(withdraws: bool) -> None:
    """Even if the clock of the earlier life ran a day ahead, so that its numbers are out of reach for the clock."""

    async with Swarm() as swarm:
        reader = (await swarm.grow(2))[1]
        earlier = await swarm.node("owner")
        mine = earlier.own_subkey()
        future = int((soon(earlier) + 86400.0) * 1000)
        earlier._author._remember(Record("key", encode_subkey(mine), b"", 0.0, sequence=future))
        assert await earlier.store("key", "earlier", soon(earlier), subkey=mine)
        swarm.nodes.remove(earlier)
        await earlier.shutdown()
        later = await swarm.node("owner")
        if withdraws:
            assert await later.withdraw("key", mine)
            assert await reader.get("key", latest=True) is None
        assert await later.store("key", "later", soon(later), subkey=mine)
        assert (await reader.get("key", latest=True)).value[mine].value == "later"  # type: ignore[union-attr]


@simulated
async def test_a_client_reads_and_writes_but_nobody_relies_on_it() -> None:
    async with Swarm() as swarm:
        nodes = await swarm.grow(3)
        client = await swarm.node("client", client_mode=True)
        assert await client.store("key", 1, soon(client), subkey=client.own_subkey())
        assert (await nodes[2].get("key")).value[client.own_subkey()].value == 1  # type: ignore[union-attr]
        assert client.core.storage.count() == 0
        assert all(client.peer_id not in node.core.contacts.table for node in nodes)
        assert await client.withdraw("key", client.own_subkey())
        for node in nodes:
            await node.shutdown()
        assert not await client.store("key", 2, soon(client))
        assert await client.get("key", latest=True) is None


@simulated
async def test_who_rests_reads_and_writes_and_keeps_nothing_for_others() -> None:
    async with Swarm() as swarm:
        first, second, third = await swarm.grow(3)
        third.rest(True)
        await asyncio.sleep(1.0)
        assert all(third.peer_id not in node.core.contacts.table for node in (first, second))
        assert await first.store("key", 1, soon(first)) and await third.store("own", 3, soon(third))
        assert (await third.get("key", latest=True)).value == 1  # type: ignore[union-attr]
        assert (await second.get("own", latest=True)).value == 3  # type: ignore[union-attr]
        assert third.core.storage.count() == 0
        third.rest(False)
        await asyncio.sleep(1.0)
        assert all(third.peer_id in node.core.contacts.table for node in (first, second))


@simulated
async def test_reading_without_latest_may_answer_from_what_was_read_lately() -> None:
    async with Swarm() as swarm:
        nodes = await swarm.grow(4)
        client = await swarm.node("client", client_mode=True)
        await nodes[0].store("key", "old", soon(nodes[0], 100.0))
        assert (await client.get("key")).value == "old"  # type: ignore[union-attr]
        await nodes[0].store("key", "new", soon(nodes[0], 200.0))
        before = client.endpoint.statistics().calls_made
        assert (await client.get("key")).value == "old"  # type: ignore[union-attr]
        assert client.endpoint.statistics().calls_made == before
        assert (await client.get("key", latest=True)).value == "new"  # type: ignore[union-attr]
        assert (await client.get("key")).value == "new"  # type: ignore[union-attr]
        await client.store("key", "own", soon(client, 300.0))
        assert (await client.get("key")).value == "own"  # type: ignore[union-attr]
        await asyncio.sleep(storage.CACHE_AGE + 1)
        before = client.endpoint.statistics().calls_made
        await client.get("key")
        assert client.endpoint.statistics().calls_made > before, "what is cached grows old"


@simulated
async def test_validators_judge_writes_here_writes_there_and_reads() -> None:
    async with Swarm() as swarm:
        rule = SchemaValidator(pydantic.create_model("Keys", number=(int, ...)))
        strict = await swarm.node("strict", record_validators=[rule])
        lax = await swarm.node("lax")
        reader = await swarm.node("reader", client_mode=True)
        assert not await strict.store("number", "text", soon(strict)), "refused before it is sent"
        assert await lax.store("number", "text", soon(lax)), "the lax node itself holds it"
        assert strict.core.storage.count() == 0
        assert await strict.get("number", latest=True) is None, "dropped on reading"
        assert (await reader.get("number")).value == "text"  # type: ignore[union-attr]
        reader.add_validators([rule])
        assert await reader.get("number") is None, "the cache is no way around a rule"
        lax.add_validators([rule])
        assert await lax.get("number", latest=True) is None
        assert await strict.store("number", 5, soon(strict, 2000.0))
        assert (await lax.get("number", latest=True)).value == 5  # type: ignore[union-attr]


@simulated
async def test_wrong_clocks_do_not_matter() -> None:
    async with Swarm() as swarm:
        for number, ahead in enumerate([600, -600, 600, *[0] * 4]):
            await swarm.node(number, ahead=ahead)
        nodes = swarm.nodes
        for writer in nodes:
            mine = writer.own_subkey()
            assert await writer.store("key", 1, soon(writer, 30.0), subkey=mine)
        for reader in nodes:
            found = await reader.get("key", latest=True)
            assert found is not None and set(found.value) == {node.own_subkey() for node in nodes}
        assert await nodes[-1].withdraw("key", nodes[-1].own_subkey())
        assert await nodes[0].withdraw("key", nodes[0].own_subkey())
        for reader in nodes:
            found = await reader.get("key", latest=True)
            left = set() if found is None else set(found.value)
            assert left == {node.own_subkey() for node in nodes[1:-1]}
        await asyncio.sleep(45.0)
        for reader in nodes:
            assert await reader.get("key", latest=True) is None, "expired for everyone"
