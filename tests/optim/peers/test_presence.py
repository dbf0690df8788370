"""Who is there: whoever is connected, or has a fresh report."""

import asyncio

import pytest

from swarmcli.events import PeerSeen, PeerSilent
from swarmcli.testing.memory_network import MemoryNetwork
from tests.optim.optim_swarm import Swarm, make_node, record
from tests.optim.peers.test_directory import Peer, ended, started
from tests.optim.peers.test_out_of_reach import training
from tests.simulation import within
from tests.suites import soak


@pytest.mark.parametrize("client_mode", [True, *soak([False])])
@within(300)
async def test_who_was_killed_is_known_at_the_next_look_and_lost_later(client_mode: bool) -> None:
    async with Swarm() as swarm:
        monitor = await swarm.trainer(seed=1, role="monitor")
        trainer = await swarm.trainer(seed=1, pace=1.0, client_mode=client_mode)
        directory, peer = monitor.core.directory, trainer.node.peer_id
        async with training(trainer):
            await asyncio.sleep(20)
            assert directory.is_there(peer) and directory.age(peer) < 15
            silent, seen = record(monitor.node, PeerSilent), record(monitor.node, PeerSeen)
            swarm.network.kill(peer)
            await asyncio.sleep(4)  # its report is fresh, and older than the end of its connection
            assert not directory.is_there(peer)
            assert [event.answers for event in silent] == [False]
            await asyncio.sleep(60)
            assert [event.gone for event in seen if event.gone] == ["lost"]


@within(300)
async def test_who_is_stopped_is_told_of_once_and_so_is_its_return() -> None:
    network = MemoryNetwork()
    nodes = [await make_node(network, 0)]
    nodes.append(await make_node(network, 1, nodes[0]))
    watcher, peer = Peer(nodes[0]), Peer(nodes[1])
    await started(watcher, peer)
    await asyncio.sleep(10)
    silent = record(nodes[0], PeerSilent)
    network.freeze(nodes[1].peer_id)
    await asyncio.sleep(16)  # a ping after five seconds of silence, six for its answer, three until the next look
    assert not watcher.directory.is_there(nodes[1].peer_id), "its report is older than its silence"
    network.thaw(nodes[1].peer_id)
    await asyncio.sleep(20)
    assert [event.answers for event in silent] == [False, True]
    await ended(peer, watcher)
    for node in reversed(nodes):
        await node.shutdown()
