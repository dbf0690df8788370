"""Relays as users have them: DHTs on real sockets, of which two cannot be dialed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmcli.dht import DHT
from tests.network.worlds import Number, double, reaches


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
