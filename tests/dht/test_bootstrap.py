"""First contacts: retried, named when they fail, and enough for peers that start at the same moment."""

from __future__ import annotations

import asyncio
import math

import pytest

from swarmcli.dht import DHTNode
from swarmcli.errors import BootstrapError, WrongPeerError
from swarmcli.network.identity import PeerID
from swarmcli.testing.virtual_time import run
from tests.simulation import simulated
from tests.suites import soak

from .swarm import Swarm, address, identity, soon


@simulated
async def test_a_first_contact_that_comes_up_late_is_waited_for() -> None:
    async with Swarm() as swarm:
        transport_name = f"memory://{identity('late').peer_id.short}"
        early = asyncio.create_task(swarm.node("early", [transport_name]))
        await asyncio.sleep(5.0)
        assert not early.done()
        late = await swarm.node("late", [])
        await early
        assert len(early.result().core.contacts.table) == len(late.core.contacts.table) == 1


@simulated
async def test_when_none_answers_each_is_named_with_what_failed() -> None:
    async with Swarm() as swarm:
        cut = await swarm.node("cut", [])
        foreign = await swarm.endpoint("no node")
        wrong = f"{cut.endpoint.addresses[0]}/{identity('somebody else').peer_id.text}"
        absent = "memory://absent"
        addresses = [address(cut), wrong, absent, foreign.addresses[0]]
        endpoint = await swarm.endpoint("newcomer")
        swarm.network.cut(cut.peer_id, endpoint.peer_id)
        started = asyncio.get_running_loop().time()
        with pytest.raises(BootstrapError, match=r"no first contact answered within 6 s") as caught:
            await DHTNode.create(endpoint, initial_peers=addresses, startup_timeout=6.0)
        assert asyncio.get_running_loop().time() - started == pytest.approx(6.0, abs=1.5)
        assert list(caught.value.attempts) == addresses
        words = [str(caught.value.attempts[each]) for each in addresses]
        assert "did not answer" in words[0]
        assert "dht.ping" in words[3]
        assert all(each in str(caught.value) for each in addresses)


@simulated
async def test_an_address_with_another_peer_s_key_ends_the_search_at_once() -> None:
    async with Swarm() as swarm:
        here = await swarm.node("here", [])
        wrong = f"{here.endpoint.addresses[0]}/{identity('somebody else').peer_id.text}"
        with pytest.raises(BootstrapError, match="no first contact answered: ") as caught:
            await swarm.node("newcomer", [wrong])
        assert asyncio.get_running_loop().time() < 1.0
        assert isinstance(caught.value.attempts[wrong], WrongPeerError)
        await swarm.node("another", [wrong, address(here)])  # the right address beside it is enough


@simulated
async def test_a_node_whose_key_another_process_uses_searches_no_longer() -> None:
    async with Swarm() as swarm:
        contact, first = await swarm.endpoint("no node"), await swarm.endpoint("twin")
        await first.connect(contact.addresses[0], timeout=5.0)
        await asyncio.sleep(60.0)
        with pytest.raises(BootstrapError, match="was there first"):
            await swarm.node("twin", list(contact.addresses), startup_timeout=math.inf)


@simulated
async def test_a_node_that_is_its_own_first_contact_is_alone() -> None:
    """All peers of a run may be given the same list."""

    async with Swarm() as swarm:
        for form in ("memory://{0.short}", "memory://{0.short}/{0.text}"):
            node = await swarm.node(form, [form.format(identity(form).peer_id)])
            assert await node.store("key", 1, soon(node))


@simulated
async def test_a_search_without_an_end_goes_on_calmly_says_whom_it_tries_and_finds_who_comes_back() -> None:
    async with Swarm() as swarm:
        gone, wrong = await swarm.node("gone", []), await swarm.node("another", [])
        stays, moved = address(gone), f"{wrong.endpoint.addresses[0]}/{identity('moved').peer_id.text}"
        swarm.kill(gone)
        endpoint, dials = await swarm.endpoint("newcomer"), list[float]()
        told: list[tuple[float, str]] = []
        loop = asyncio.get_running_loop()
        endpoint.events.subscribe(lambda event: told.append((loop.time(), getattr(event, "text", ""))))
        connect = endpoint.connect

        async def counted(where: str, *, timeout: float) -> PeerID:
            dials.append(loop.time())
            return await connect(where, timeout=timeout)

        endpoint.connect = counted  # type: ignore[method-assign]
        start = asyncio.create_task(
            DHTNode.create(endpoint, initial_peers=[stays, moved], startup_timeout=math.inf, owns_endpoint=True)
        )
        await asyncio.sleep(1200.0)
        assert not start.done()
        assert len([each for each in dials if each > 600.0]) <= 2 * 600 / 10, "two addresses, each 15 s at most"
        assert 4 <= len(told) <= 12, "said soon, then less and less often"
        assert told[0][0] < 30.0 and all(
            gone.peer_id.short in text and wrong.peer_id.short in text and "since" in text for _, text in told
        )
        assert "Ctrl-C" in told[-1][1] and "--peer" in told[-1][1]
        back = await swarm.node("gone", [])
        before = loop.time()
        swarm.nodes.append(await start)
        assert loop.time() - before <= 20.0 and len(back.core.contacts.table) == 1


@pytest.mark.parametrize("batch", [0, *soak([1, 2, 3])])
def test_four_peers_that_start_at_the_same_moment_form_one_network(batch: int) -> None:
    """Thirty-two times in all; the three with a first contact are there before it, with it, and after it."""

    async def start(seed: int) -> None:
        async with Swarm(seed, latency=lambda a, b: swarm.network.random.uniform(0.001, 0.05)) as swarm:
            delays = [swarm.network.random.choice([0.0, 0.0, 0.01, 0.2]) for _ in range(4)]
            contact = f"memory://{identity(0).peer_id.short}"

            async def one(number: int) -> DHTNode:
                await asyncio.sleep(delays[number])
                return await swarm.node(number, [contact])

            nodes = await asyncio.gather(*(one(number) for number in range(4)))
            assert [len(node.core.contacts.table) for node in nodes] == [3, 3, 3, 3], f"seed {seed}"
            assert await nodes[1].store("key", seed, soon(nodes[1]))
            for node in nodes:
                assert (await node.get("key", latest=True)).value == seed  # type: ignore[union-attr]

    for seed in range(8 * batch, 8 * batch + 8):
        run(start(seed), seed=seed)
