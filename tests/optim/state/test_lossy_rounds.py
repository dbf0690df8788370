"""A lossy codec for states erases no small update: differences travel, of local updates those from the anchor."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarmcli.compression import Float16Compression
from swarmcli.events import RoundFinished
from swarmcli.optim.modes.base import StateOptions
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.modes.outer import LocalUpdates
from tests.optim.optim_swarm import Swarm, Trainer, digests, make_model, record, reference, together, until
from tests.simulation import within

CHANGE = 1e-4  # of each parameter per step, an eighth of what float16 tells apart


async def learn(peer: Trainer, until: int) -> int:
    """Makes steps of one relative size up to this epoch; returns how many."""
    steps = 0
    while peer.epoch < until:
        await asyncio.sleep(peer.pace)
        peer.weights.grad = CHANGE * make_model(1)
        await peer.core.step(peer.batch_size)
        steps += 1
    return steps


def plain(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def careful(params) -> torch.optim.Optimizer:
    """An epoch moves parameters by less than float16 tells apart."""
    return torch.optim.SGD(params, lr=1e-6)


def moved(peer: Trainer, steps: float) -> float:
    """The fraction of these steps that is in the parameters."""
    start = make_model(1).detach()
    return float((start - peer.weights.detach()).norm() / (CHANGE * steps * start.norm()))


@within(300)
async def test_newcomers_and_a_follower_end_with_the_same_bits() -> None:
    async with Swarm() as swarm:
        mode = LocalUpdates(state=StateOptions(compression=Float16Compression(), delay=False))
        options = {"seed": 1, "make": plain, "scheduler": lambda _: None, "mode": mode, "batch_size": 8}
        first = [await swarm.trainer(**options) for _ in range(2)]
        monitor = await swarm.trainer(**options, role="monitor")
        steps = [0, 0]

        async def train(number: int) -> None:
            steps[number] = await learn(first[number], 5)

        async def come_later() -> None:
            await until(lambda: first[0].epoch == 1)
            newcomer = await swarm.trainer(**options)
            await learn(newcomer, 5)

        await together(train(0), train(1), monitor.follow(5), come_later())
        assert len(swarm.trainers) == 4
        assert len(digests(swarm.trainers)) == 1
        assert 0.7 < moved(monitor, sum(steps) / 2) < 1.1  # the newcomer has made fewer steps


@within(300)
async def test_states_beside_gradients_get_the_differences_from_their_last_average() -> None:
    async with Swarm() as swarm:
        options = {
            "seed": 1,
            "make": careful,
            "mode": Mode(state=StateOptions(average_every=1, delay=False, compression=Float16Compression())),
        }
        peers = [await swarm.trainer(**options) for _ in range(2)]
        rounds = record(peers[0].node, RoundFinished)

        async def sent(until: int) -> list[int]:
            """Trains up to this epoch; returns the bytes that the first peer sent in each round of states."""
            await together(*(peer.train(until) for peer in peers))
            assert len(digests(peers)) == 1
            told = [event.bytes_sent for event in rounds if event.purpose == "run_state"]
            rounds.clear()
            return told

        exact, *others = await sent(3)
        assert others and max(others) < 0.7 * exact  # an eighth of the parameters' size, and the frames
        peers[1].weights.data += 1e-5
        await sent(4)
        learned = peers[0].weights.detach() - reference(1, swarm.batches(4), careful)
        assert float(learned.mean()) == pytest.approx(0.5e-5, rel=0.01)
        peers.append(await swarm.trainer(**options))
        told = await sent(8)
        assert max(told) > min(told)  # the newcomer had no reference
