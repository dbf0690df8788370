"""The synchronous shell, over real TCP on loopback."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmcli.clock import get_dht_time
from swarmcli.dht import DHT, DHTNode, ValueWithExpiration
from swarmcli.errors import AddressError, BootstrapError, IdentityError, ListenError
from swarmcli.network.addresses import parse_address
from tests.network.worlds import Number, double, reaches


@pytest.fixture
def first() -> Iterator[DHT]:
    with DHT(start=True, host="127.0.0.1") as dht:
        yield dht


def joined(first: DHT, **options: Any) -> DHT:
    return DHT(first.get_visible_addresses(), start=True, host="127.0.0.1", **options)


def swarm_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("swarm")]


def test_peers_store_and_read(first: DHT) -> None:
    with joined(first) as second, joined(first, client_mode=True) as client:
        expiration = get_dht_time() + 60
        assert second.store("key", [1, "two"], expiration)
        assert first.get("key") == client.get("key", latest=True) == ValueWithExpiration([1, "two"], expiration)
        mine = client.own_subkey()
        assert client.store("dictionary", 5, expiration, subkey=mine)
        assert second.get("dictionary", latest=True).value == {mine: (5, expiration)}  # type: ignore[union-attr]
        assert client.withdraw("dictionary", mine)
        assert second.get("dictionary", latest=True) is None


def test_futures_may_be_waited_for_and_awaited(first: DHT) -> None:
    stored = first.store("key", 1, get_dht_time() + 60, return_future=True)
    assert stored.result(timeout=60) is True

    async def main() -> Any:
        return await first.get("key", return_future=True)

    assert asyncio.run(main()).value == 1


def test_addresses_are_what_others_need(first: DHT) -> None:
    (visible,) = first.get_visible_addresses()
    address = parse_address(visible)
    assert (address.scheme, address.host, address.peer_id) == ("tcp", "127.0.0.1", first.peer_id)
    assert first.get_visible_maddrs() == [visible]
    with joined(first, client_mode=True) as client:
        assert client.client_mode and client.get_visible_addresses() == []
    with DHT(start=True, host="127.0.0.1", announce_addresses=["tcp://example.org:5"]) as announced:
        assert announced.get_visible_addresses() == [f"tcp://example.org:5/{announced.peer_id.text}"]


def test_coroutines_run_on_the_loop_with_the_node(first: DHT) -> None:
    async def with_node(dht: DHT, node: DHTNode) -> object:
        assert dht is first
        return await node.store("key", 1, node.endpoint.clock.now() + 60)

    async def alone() -> str:
        return threading.current_thread().name

    assert first.run_coroutine(with_node) is True
    assert first.run_coroutine(alone()) == "swarm-loop"
    assert first.run_coroutine(with_node, return_future=True).result(60) is True  # type: ignore[union-attr]


def test_limits_hold_from_the_start_and_may_change(first: DHT) -> None:
    second = DHT(first.get_visible_addresses(), start=False, host="127.0.0.1")
    second.limit_rates(50e3, None)
    with second:
        assert second.endpoint.rates.upload.limit == 50e3
        second.limit_rates(None, 20e3)
        assert second.endpoint.rates.upload.limit is None and second.endpoint.rates.download.limit == 20e3
        with pytest.raises(ValueError, match="upload of 0 bytes per second"):
            second.limit_rates(0, None)
        assert second.endpoint.rates.download.limit == 20e3


def test_a_key_file_gives_the_same_peer_again(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    with DHT(start=True, host="127.0.0.1", identity_path=path) as dht:
        peer = dht.peer_id
        with pytest.raises(IdentityError, match="in use"):
            DHT(start=False, identity_path=path)
    with DHT(start=True, host="127.0.0.1", identity_path=str(path)) as again:
        assert again.peer_id == peer


def test_a_start_that_fails_leaves_nothing(first: DHT, tmp_path: Path) -> None:
    port = parse_address(first.get_visible_addresses()[0]).port
    path = tmp_path / "identity.pem"
    options: dict[str, Any] = {"start": True, "host": "127.0.0.1", "identity_path": path}
    with pytest.raises(ListenError):
        DHT(port=port, **options)
    with pytest.raises(AddressError):
        DHT(["nonsense"], **options)
    with pytest.raises(BootstrapError, match="nothing listens there") as caught:
        DHT(["tcp://127.0.0.1:1"], startup_timeout=2.0, **options)
    assert list(caught.value.attempts) == ["tcp://127.0.0.1:1"]
    files = {Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert files <= {"test_dht.py", "hivemind_names.py", "dht.py"}, "where on the loop it arose helps nobody"
    with DHT(**options):
        pass  # the key file is free again


def test_a_start_in_the_background_shows_its_error_at_the_first_call() -> None:
    dht = DHT(["tcp://127.0.0.1:1"], start=True, host="127.0.0.1", startup_timeout=0.3, await_ready=False)
    try:
        with pytest.raises(BootstrapError):
            dht.get("key")
        assert not dht.is_alive()
    finally:
        dht.shutdown()


def test_shutdown_ends_everything_and_may_be_repeated() -> None:
    dht = DHT(start=False, host="127.0.0.1")
    assert not dht.is_alive()
    with pytest.raises(RuntimeError, match="not running"):
        dht.get("key")
    dht.run_in_background()
    assert dht.is_alive() and "running" in repr(dht)
    with pytest.raises(RuntimeError, match="started already"):
        dht.run_in_background()
    dht.shutdown()
    dht.shutdown()
    assert not dht.is_alive() and swarm_threads() == []
    with pytest.raises(RuntimeError, match="not running"):
        dht.get("key")
    with pytest.raises(RuntimeError, match="not running"):
        _ = dht.node
    with pytest.raises(RuntimeError, match="shut down"):
        dht.run_in_background()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_two_that_nobody_dials_reach_each_other_and_the_relay_advertises_itself() -> None:
    with DHT(start=True, host="127.0.0.1", relay=True, relay_rate=1e9) as relay:
        contacts = relay.get_visible_addresses()
        with DHT(contacts, start=True, client_mode=True) as a, DHT(contacts, start=True, client_mode=True) as b:

            async def talk() -> None:
                b.endpoint.serve("double", Number, double)
                await until(lambda: bool(a.endpoint.addresses and b.endpoint.addresses))
                assert a.get_visible_addresses() == []  # whoever knows nobody does not find the relay
                assert a.endpoint.addresses == (f"relay://{relay.peer_id.text}/{a.peer_id.text}",)
                a.endpoint.learn(b.peer_id, b.endpoint.addresses)
                assert await reaches(a.endpoint, b.endpoint)

            a.run_coroutine(talk())
            assert "1 relay" in a.reach.sentence()
            while (found := a.get("relays", latest=True)) is None:  # bounded by the test's own time limit
                pass
            assert found.value[relay.own_subkey()].value["addresses"]
