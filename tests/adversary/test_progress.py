"""Members that claim samples which they never hand in, or keep those of others out: epochs go by samples that are
there, and they go on."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from swarmcli.averaging.control import RoundRequest, StepControl
from swarmcli.averaging.group import Member
from swarmcli.network import Identity
from swarmcli.optim.peers.board import Board
from swarmcli.optim.peers.progress import LocalTrainingProgress
from swarmcli.testing import virtual_time
from tests.adversary.leading import alter_list
from tests.adversary.lies import Liar
from tests.adversary.lies.base import on_each_try
from tests.optim.optim_swarm import TARGET, Swarm, Trainer, together, until
from tests.suites import soak

EPOCH = 16.0  # seconds that the samples of an epoch take the honest
SECONDS = 15 * EPOCH


def claim(trainer: Trainer, *, leads: bool = False) -> Liar:
    """It has all samples of each epoch at once, by its own word, and hands in none. With `leads` it gets to the front,
    and begins as soon as two follow it."""
    liar = Liar(random.Random(0), trainer.node.endpoint, averager=trainer.core.work.averager)
    assert liar.averager is not None
    begin, finder = liar.averager.begin_round, liar.averager.finder
    tracker, new_search = trainer.core.tracker, finder._new_search
    report = tracker.report_local_progress

    def begin_round(request: RoundRequest) -> StepControl:
        control = begin(request)
        control.report(float(TARGET))
        control.begun.add_done_callback(lambda begun: liar.told.append("a claim") if not begun.cancelled() else None)
        return control

    def search_that_leads(control: StepControl, gathered: bytes) -> object:
        search = min((new_search(control, gathered) for _ in range(64)), key=lambda each: each.rank)
        gathering = search.gathering
        gathering.due_at = lambda now, **_: now if len(gathering) > 2 else math.inf  # type: ignore[method-assign]
        return search

    liar.averager.begin_round = begin_round  # type: ignore[method-assign]
    tracker.report_local_progress = lambda epoch, samples, update=True: report(epoch, TARGET, update)  # type: ignore[method-assign,misc]
    if leads:
        finder._new_search = search_that_leads  # type: ignore[assignment]
    return liar


def list_keys(trainer: Trainer) -> Liar:
    """It computes as the others do. Where it leads, it begins as soon as two follow it, with a key that claims all."""
    liar = Liar(random.Random(0), trainer.node.endpoint, averager=trainer.core.work.averager)
    assert liar.averager is not None
    finder = liar.averager.finder
    new_search = finder._new_search
    key = Member(Identity.from_seed(99).peer_id, claim=float(TARGET))

    def search_in_haste(control: StepControl, gathered: bytes) -> object:
        search = new_search(control, gathered)
        gathering = search.gathering
        gathering.due_at = lambda now, **_: now if len(gathering) > 2 else math.inf  # type: ignore[method-assign]
        return search

    finder._new_search = search_in_haste  # type: ignore[assignment]
    alter_list(liar, lambda followers: [*followers, key])
    return liar


def keep_out(trainer: Trainer) -> Liar:
    """It averages its own parts of nobody else's gradients."""
    liar = Liar(random.Random(0), trainer.node.endpoint, averager=trainer.core.work.averager)

    def alter(round_: Any) -> None:
        reducer = round_._reducer
        if reducer is not None and reducer.parts:
            liar.told.append("alone")
            finish = reducer._finish

            def finish_alone(position: int) -> Any:
                for member, sender in reducer._senders.items():
                    if member != round_.mates.me:
                        sender.counts = 0.0
                return finish(position)

            reducer._finish = finish_alone

    on_each_try(liar, alter)
    return liar


async def come_again(swarm: Swarm, told: list[str]) -> None:
    """Under a new key each time that a round has begun with the last one."""
    while True:
        trainer = await swarm.trainer(seed=1)
        await trainer.core.join()
        liar = claim(trainer)
        lying = asyncio.create_task(trainer.follow(1000))
        try:
            await until(lambda liar=liar: bool(liar.told))  # type: ignore[misc]
            await asyncio.sleep(0.1)
        finally:
            told += liar.told
            lying.cancel()
        await swarm.kill(trainer)


LIES: dict[str, Callable[[Trainer], Liar]] = {
    "member": claim,
    "leader": lambda trainer: claim(trainer, leads=True),
    "reducer": keep_out,
    "lister": list_keys,
}
CASES = [("member", 4, 1), ("stranger", 4, 1), ("leader", 4, 1), ("reducer", 4, 1), ("lister", 4, 1)]
LARGER = [(who, count, liars) for count, liars in [(8, 2), (16, 5)] for who in LIES] + [("stranger", 8, 2)]


@pytest.mark.parametrize(("who", "count", "liars"), [*CASES, *soak(LARGER)])
def test_samples_that_nobody_hands_in_end_no_epoch_and_hold_none_up(who: str, count: int, liars: int) -> None:
    async def main() -> None:
        async with Swarm(3) as swarm:
            pace = EPOCH * (count - liars) / TARGET
            trainers = [await swarm.trainer(seed=1, batch_size=1, pace=pace) for _ in range(count)]
            await together(*(trainer.core.join() for trainer in trainers))
            await together(*(trainer.train(2) for trainer in trainers))
            honest, hostile = trainers[:-liars], trainers[-liars:]
            told: list[str] = []
            if who == "stranger":
                for trainer in hostile:
                    await trainer.core.shutdown()
                lying = [asyncio.create_task(come_again(swarm, told)) for _ in hostile]
            else:
                for trainer in hostile:
                    told = LIES[who](trainer).told
                does = Trainer.train if who in {"reducer", "lister"} else Trainer.follow
                lying = [asyncio.create_task(does(trainer, 10_000)) for trainer in hostile]
            working = [asyncio.create_task(trainer.train(10_000)) for trainer in honest]
            await asyncio.sleep(SECONDS)
            for task in (*working, *lying):
                assert not task.done(), task
                task.cancel()
            advanced = [event for trainer in honest for event in trainer.epochs[2:]]
            samples = {event.epoch: event.samples for event in advanced if event.samples}  # 0: it followed the others
            print(f"{who} {count}: {len(samples)} epochs, samples {list(samples.values())}, lies {len(told)}")
            assert told and all(each >= TARGET / 2 for each in samples.values())
            usual = math.ceil(TARGET / len(honest)) * pace
            # A stranger is killed in its round: that costs as much without a claim. The last two compute as well.
            slower = {"stranger": 2.5, "reducer": 1.25, "lister": 1.25}.get(who, 2.0)
            assert SECONDS / usual / slower <= len(samples) == len({event.lineage for event in advanced})
            assert max(trainer.epoch for trainer in honest) - min(trainer.epoch for trainer in honest) <= 1

    virtual_time.run(main(), timeout=3600)


def test_one_quick_computer_beside_slow_ones_has_to_wait_for_none_of_them() -> None:
    """Of its weight three quarters count at most, and all of its samples count towards the end of an epoch."""

    async def main() -> None:
        async with Swarm(3) as swarm:
            slow = [await swarm.trainer(seed=1, batch_size=1, pace=4.0) for _ in range(3)]
            quick = await swarm.trainer(seed=1, batch_size=1, pace=0.1)
            everyone = (quick, *slow)
            await together(*(trainer.core.join() for trainer in everyone))
            await together(*(trainer.train(2) for trainer in everyone))
            began, until_epoch = asyncio.get_running_loop().time(), quick.epoch + 10
            await together(*(trainer.train(until_epoch) for trainer in everyone))
            took = (asyncio.get_running_loop().time() - began) / 10
            assert took < TARGET * 0.1 + 4.0 + 1.0, took  # the slow ones end their batch
            assert any(event.samples < TARGET for event in quick.epochs), "what counts is less"

    virtual_time.run(main(), timeout=3600)


def test_no_leader_is_given_up_by_what_a_stranger_reports() -> None:
    """It takes part in nothing, and has all samples of each epoch by its own word: half of the epochs were lost."""

    async def main() -> None:
        async with Swarm(3) as swarm:
            pace = 2 * EPOCH * 4 / TARGET
            trainers = [await swarm.trainer(seed=1, batch_size=1, pace=pace) for _ in range(4)]
            await together(*(trainer.core.join() for trainer in trainers))
            await together(*(trainer.train(2) for trainer in trainers))
            node = await swarm.node()
            board = Board(node, "run_progress", LocalTrainingProgress, 60.0, None)

            async def boast() -> None:
                while True:
                    told = LocalTrainingProgress(
                        peer_id=bytes(node.peer_id),
                        epoch=trainers[0].epoch,
                        samples_accumulated=TARGET,
                        samples_per_second=0.0,
                        time=node.endpoint.clock.now(),
                        client_mode=False,
                    )
                    await board.publish(told)
                    await asyncio.sleep(1)

            tasks = [asyncio.create_task(work) for work in (boast(), *(each.train(10_000) for each in trainers))]
            await asyncio.sleep(12 * EPOCH)
            for task in tasks:
                assert not task.done(), task
                task.cancel()
            assert min(trainer.epoch for trainer in trainers) - 2 >= 5
            doubts = [trainer.core.work.averager.doubts for trainer in trainers]
            assert not any(each.reason(trainer.node.peer_id) for each in doubts for trainer in trainers)

    virtual_time.run(main(), timeout=3600)
