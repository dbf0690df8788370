"""Offers of state in the hash table, and downloads from the best of those who make them."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarmcli.dht.records import OwnedSubkey
from swarmcli.errors import StateDownloadError
from swarmcli.events import StateDonated, StateDownloaded
from swarmcli.network import wire
from swarmcli.state.sharing import StateOffer
from tests.averaging.averagers import Averagers
from tests.simulation import simulated


@simulated
async def test_a_newcomer_loads_the_state_of_the_highest_priority() -> None:
    async with Averagers(0) as swarm:
        donors = await swarm.add(3, share_state=True)
        newcomer = await swarm.add_one()
        donors[1].core.sharing.declare(StateOffer(priority=2.0, epoch=7, tag=b"line"))
        await asyncio.sleep(1)
        state = await newcomer.core.sharing.download(timeout=30)
        assert state is not None and state.donors[0] == donors[1].peer_id
        assert [float(tensor.flatten()[0]) for tensor in state.tensors.values()] == [1.0, 10.0]
        assert newcomer.values == [3.0, 30.0]  # what to do with it is the caller's business
        (event,) = [event for event in newcomer.events if isinstance(event, StateDownloaded)]
        assert (event.epoch, event.lineage) == (7, b"line".hex())
        await asyncio.sleep(1)
        assert any(isinstance(event, StateDonated) for event in donors[1].events)


@simulated
async def test_equal_priorities_prefer_the_higher_epoch() -> None:
    async with Averagers(1) as swarm:
        donors = await swarm.add(4, share_state=True)
        for number, donor in enumerate(donors):
            donor.core.sharing.declare(StateOffer(epoch=number))
        await asyncio.sleep(1)
        order = [peer for peer, _ in await donors[3].core.sharing.donors()]
        assert order == [donors[number].peer_id for number in (2, 1, 0)]  # without oneself


@simulated
async def test_a_client_offers_its_state_while_it_has_a_relay() -> None:
    async with Averagers(7) as swarm:
        await swarm.add_one(relays=True)
        donor = await swarm.add_one(listening=False, relays=True, share_state=None)
        hidden = await swarm.add_one(listening=False, share_state=None)
        newcomer = await swarm.add_one(listening=False, relays=True)
        await asyncio.sleep(1)
        assert [peer for peer, _ in await newcomer.core.sharing.donors()] == [donor.peer_id]
        state = await newcomer.core.sharing.download()
        assert state is not None and state.donors == (donor.peer_id,)
        donor.endpoint.announce(relayed=())
        await asyncio.sleep(1)
        assert await newcomer.core.sharing.donors() == []
        assert await hidden.core.sharing.download() is None


@simulated
async def test_donors_that_are_gone_are_named() -> None:
    async with Averagers(4) as swarm:
        contact, donor, newcomer = [await swarm.add_one(share_state=number == 1) for number in range(3)]
        await asyncio.sleep(1)
        swarm.kill(donor)
        with pytest.raises(StateDownloadError) as caught:
            await newcomer.core.sharing.download(timeout=20)
        assert list(caught.value.attempts) == [donor.peer_id.text]
        assert contact.peer_id.text not in caught.value.attempts


@pytest.mark.parametrize("value", [b"garbage", wire.encode({"priority": float("nan")})])
@simulated
async def test_offers_that_no_honest_donor_makes(value: object) -> None:
    async with Averagers(7) as swarm:
        liar, other = await swarm.add(2)
        expiration = liar.endpoint.clock.now() + 60
        await liar.node.store("test.state", value, expiration, subkey=OwnedSubkey(liar.peer_id, b""))
        await liar.node.store("test.state", wire.encode(StateOffer()), expiration, subkey="nobody's")
        assert await other.core.sharing.donors() == []


@simulated
async def test_a_donor_whose_own_round_runs_gives_little() -> None:
    async with Averagers(8) as swarm:

        async def get_state() -> tuple[None, list[torch.Tensor]]:
            return None, [torch.ones(1 << 18)]

        donor = await swarm.add_one(share_state=True, get_state=get_state)
        newcomer = await swarm.add_one()
        await asyncio.sleep(1)
        async with donor.core.tensors():  # as an all-reduce does
            loading = asyncio.create_task(newcomer.core.sharing.download())
            await asyncio.sleep(9)
            assert (1 << 16) < newcomer.endpoint.statistics().traffic.received < 6 * (1 << 16)
        began = asyncio.get_running_loop().time()
        assert await loading is not None
        assert asyncio.get_running_loop().time() - began < 1


@simulated
async def test_sharing_can_be_ended_and_begun_again() -> None:
    async with Averagers(10) as swarm:
        donor, newcomer = [await swarm.add_one(share_state=number == 0) for number in range(2)]
        await asyncio.sleep(1)
        donor.core.sharing.share(False)
        with pytest.raises(StateDownloadError):  # it still knows the offer, or reads it before it is withdrawn
            await newcomer.core.sharing.download(timeout=20)
        await asyncio.sleep(1)
        assert await newcomer.core.sharing.download() is None
        donor.core.sharing.share(True)
        donor.core.sharing.share(True)
        await asyncio.sleep(1)
        assert await newcomer.core.sharing.download() is not None


@simulated
async def test_who_asks_while_the_state_is_copied_for_another_does_not_get_that_copy() -> None:
    values, copying = [torch.zeros(3)], asyncio.Event()

    async def get_state() -> tuple[None, list[torch.Tensor]]:
        copy = values[0].clone()
        copying.set()
        await asyncio.sleep(1)
        return None, [copy]

    async with Averagers(12) as swarm:
        await swarm.add_one(share_state=True, get_state=get_state)
        newcomers = await swarm.add(2)
        await asyncio.sleep(1)
        first = asyncio.create_task(newcomers[0].core.sharing.download())
        await copying.wait()
        values[0] = torch.ones(3)
        second = await newcomers[1].core.sharing.download()
        assert second is not None and torch.equal(second.tensors["0"], torch.ones(3))
        state = await first
        assert state is not None and torch.equal(state.tensors["0"], torch.zeros(3))
