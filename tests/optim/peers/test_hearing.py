"""Who is heard of, by what, and how soon it is known that somebody no longer is."""

import asyncio
import itertools

import pytest

from swarmcli.events import PeerSeen, PeerSilent
from swarmcli.testing import virtual_time
from swarmcli.testing.memory_network import MemoryNetwork
from tests.optim.optim_swarm import Swarm, Trainer, make_node, record
from tests.optim.peers.test_directory import Peer, ended, started
from tests.optim.peers.test_out_of_reach import helped, now, training


async def ages(watcher: Trainer, peer: Trainer, seconds: float) -> list[tuple[float, float, bool]]:
    """Moment, seconds since `peer` was heard of, and whether it counts as alive; ten times a second."""
    seen = []
    hearing = watcher.core.directory.hearing
    for _ in range(round(seconds * 10)):
        seen.append((now(), hearing.age(peer.node.peer_id), hearing.answers(peer.node.peer_id)))
        await asyncio.sleep(0.1)
    return seen


@pytest.mark.soak
@pytest.mark.parametrize("client_mode", [False, True])
def test_who_was_killed_is_known_within_five_seconds_and_lost_later(client_mode: bool) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            monitor = await swarm.trainer(seed=1, role="monitor")
            trainer = await swarm.trainer(seed=1, pace=1.0, client_mode=client_mode)
            async with training(trainer):
                healthy = (await ages(monitor, trainer, 20))[50:]
                assert all(age < 5 and answers for _, age, answers in healthy)
                silent, seen = record(monitor.node, PeerSilent), record(monitor.node, PeerSeen)
                swarm.network.kill(trainer.node.peer_id)
                after = await ages(monitor, trainer, 20)
                assert not any(answers for moment, _, answers in after if moment > after[0][0] + 5)
                assert [event.answers for event in silent] == [False]
                await asyncio.sleep(60)
                assert [event.gone for event in seen if event.gone] == ["lost"]

    virtual_time.run(main(), timeout=300)


def test_who_was_stopped_is_known_within_five_seconds_and_so_is_its_return() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        nodes = [await make_node(network, 0)]
        nodes.append(await make_node(network, 1, nodes[0]))
        watcher, peer = Peer(nodes[0]), Peer(nodes[1])
        await started(watcher, peer)
        await asyncio.sleep(10)
        hearing, silent = watcher.directory.hearing, record(nodes[0], PeerSilent)
        assert hearing.answers(nodes[1].peer_id)
        network.freeze(nodes[1].peer_id)
        await asyncio.sleep(5)
        assert not hearing.answers(nodes[1].peer_id)
        await asyncio.sleep(10)
        network.thaw(nodes[1].peer_id)
        await asyncio.sleep(20)
        assert [event.answers for event in silent] == [False, True]
        await ended(peer, watcher)
        for node in reversed(nodes):
            await node.shutdown()

    virtual_time.run(main(), timeout=300)


def test_moments_never_run_backwards() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            pair = [await swarm.trainer(seed=1, pace=0.3 + 0.2 * n) for n in range(2)]
            async with training(*pair):
                await asyncio.sleep(3)
                heard = [moment - age for moment, age, _ in await ages(pair[0], pair[1], 6)]
                assert all(later >= earlier - 1e-6 for earlier, later in itertools.pairwise(heard))

    virtual_time.run(main(), timeout=300)


def test_two_that_cannot_dial_each_other_hear_of_each_other_by_a_third() -> None:
    async def main() -> None:
        async with Swarm() as swarm, helped(swarm):
            pair = [await swarm.trainer(seed=1, pace=1.0, client_mode=True) for _ in range(2)]
            async with training(*pair):
                await asyncio.sleep(5)
                assert all(age < 5 and answers for _, age, answers in await ages(*pair, 8))
                await swarm.kill(pair[1])
                after = await ages(*pair, 10)
                assert not any(answers for moment, _, answers in after if moment > after[0][0] + 5)

    virtual_time.run(main(), timeout=300)


@pytest.mark.soak
def test_all_expect_the_same_progress() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainers = [await swarm.trainer(seed=1, target=600, pace=0.1 + 0.1 * n) for n in range(3)]
            async with training(*trainers):
                await asyncio.sleep(14)
                rate = sum(4 / trainer.pace for trainer in trainers)
                for _ in range(24):
                    await asyncio.sleep(0.25)
                    bars = [
                        600 * t.core.tracker.global_epoch
                        + min(600.0, sum(samples for samples, _ in t.core.tracker.expected().values()))
                        for t in trainers
                    ]
                    assert max(bars) - min(bars) <= 1.2 * rate, "more than a second apart"

    virtual_time.run(main(), timeout=300)


def test_a_loop_that_was_held_up_takes_nobody_for_silent() -> None:
    """Other threads ask while it hangs; and when it goes on, it looks before it has read what came meanwhile."""

    async def main() -> None:
        async with Swarm() as swarm:
            pair = [await swarm.trainer(seed=1, pace=1.0) for _ in range(2)]
            hearing, peer = pair[0].core.directory.hearing, pair[1].node.peer_id
            async with training(*pair):
                await asyncio.sleep(10)
                assert hearing.answers(peer)
                loop = asyncio.get_running_loop()
                hearing._time = lambda: loop.time() + 30  # as another thread sees it in the middle of the pause
                assert hearing.answers(peer) and hearing.age(peer) < 5
                hearing._look()
                assert hearing.answers(peer) and hearing.age(peer) < 5

    virtual_time.run(main(), timeout=300)


@pytest.mark.parametrize("pause", [2.4, 4.6])
def test_a_pause_of_two_seconds_is_no_silence_and_one_that_lasts_is(pause: float) -> None:
    """At any moment between two questions."""

    async def main() -> None:
        network = MemoryNetwork()
        nodes = [await make_node(network, 0)]
        nodes.append(await make_node(network, 1, nodes[0]))
        watcher, peer = Peer(nodes[0]), Peer(nodes[1])
        await started(watcher, peer)
        await asyncio.sleep(10)
        silent = record(nodes[0], PeerSilent)
        for _ in range(8):
            network.freeze(nodes[1].peer_id)
            await asyncio.sleep(pause)
            assert watcher.directory.hearing.answers(nodes[1].peer_id) == (pause < 4)
            network.thaw(nodes[1].peer_id)
            await asyncio.sleep(5.13)
        assert bool(silent) == (pause > 4)
        await ended(peer, watcher)
        for node in reversed(nodes):
            await node.shutdown()

    virtual_time.run(main(), timeout=300)
