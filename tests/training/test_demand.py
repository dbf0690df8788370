from __future__ import annotations

import asyncio
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from torch import nn

from swarmcli.averaging.round.plan import Layout
from swarmcli.events import EpochAdvanced, RoundFinished
from swarmcli.optim.arguments import averager_config
from swarmcli.optim.auxiliary import AuxiliaryCore
from swarmcli.optim.config import OptimizerConfig, PeerContext, PeerDescription, Role
from swarmcli.recipe.offered import UNKNOWN, RunEstimate
from swarmcli.testing import virtual_time
from swarmcli.training.demand import COMPRESSIONS, Demand, demand_of, passed_on
from tests.optim import optim_swarm
from tests.recipe.recipes import small
from tests.suites import soak

OUTLINE = nn.Sequential(nn.Linear(100, 200, device="meta"), nn.Linear(200, 10, device="meta"))
NUMBERS = 100 * 200 + 200 + 200 * 10 + 10


def demand(
    *overrides: str, role: Role = "trainer", going: RunEstimate = UNKNOWN, outline: nn.Module = OUTLINE
) -> Demand:
    return demand_of(small(*overrides), outline, role, going)


def test_each_epoch_moves_at_most_twice_what_is_averaged() -> None:
    assert demand().sent == 2 * 4 * NUMBERS
    assert demand("compression.gradients=float16").sent == 2 * 2 * NUMBERS
    local = demand("local_updates.enabled=true", "averaging.average_opt_statistics=[exp_avg_sq]")
    assert local.sent == 2 * 4 * 2 * NUMBERS


@pytest.mark.parametrize("codec", COMPRESSIONS)
def test_a_round_is_told_in_the_bytes_that_its_members_count(codec: str) -> None:
    layout = Layout.of([torch.empty(p.shape) for p in OUTLINE.parameters()], COMPRESSIONS[codec])
    assert demand(f"compression.gradients={codec}").round == layout.round_bytes(senders=64)


def test_the_state_is_the_model_and_the_statistics_that_travel() -> None:
    assert demand().parameters == NUMBERS
    assert demand().state == demand(role="monitor").state == 3 * 4 * NUMBERS and demand(role="auxiliary").state == 0
    outer = demand("outer={optimizer: nesterov, inner_batch_size: 8}")
    assert (outer.state, outer.sent) == (2 * 4 * NUMBERS, demand().sent)
    assert demand("outer={optimizer: sgd, momentum: 0, inner_batch_size: 8}").state == 4 * NUMBERS
    assert demand("outer={optimizer: adam, inner_batch_size: 8}").state == 3 * 4 * NUMBERS


def test_thin_matrices_count_where_they_are_sent() -> None:
    thin = demand("gradient_averaging.method=powersgd", "gradient_averaging.rank=4")
    assert thin.sent == 2 * 4 * (4 * (100 + 200) + 200 + 4 * (200 + 10) + 10)
    cube = nn.Module()  # the two extents with the smaller product are one, as where it is averaged
    cube.weight = nn.Parameter(torch.empty(8, 16, 64, device="meta"))
    thin = demand("gradient_averaging.method=powersgd", "gradient_averaging.rank=4", outline=cube)
    assert thin.sent == 2 * 4 * 4 * (8 * 16 + 64)


def test_of_sparse_gradients_the_averages_grow_with_the_trainers() -> None:
    """320 numbers of ten chunks: levels, 7 planes of lower bits, upper bits, 2 bits each; then 960 of their average."""
    sparse = ("averaging.trust=members", "gradient_averaging={method: topk, k: 32}")
    outline = nn.Linear(4096, 10, bias=False, device="meta")
    told = demand(*sparse, going=RunEstimate(12.0, trainers=2), outline=outline)
    assert (told.message, told.average) == (80 + 7 * 40 + 81 + 80, 40 + 4 + 5 * 120 + 281 + 480)
    assert (told.sent, told.received) == pytest.approx([2 / 3 * (told.message + told.average)] * 2, rel=0.01)
    many = demand(*sparse, outline=outline)  # of 64 there may be half of all numbers in it
    assert (many.message, many.average, many.round) == (521, *[44 + 2560 + 5121 + 10240] * 2)
    assert many.sent == many.received == many.message + many.average


def test_an_hour_is_told_by_the_contacts_pace_and_not_guessed() -> None:
    told = demand(going=RunEstimate(12.0))
    assert told.an_hour(told.sent) == 300 * told.sent == 300 * 2 * 4 * NUMBERS and told.told_pace == 12.0
    assert not told.peers_are_told, "of whom nothing is said nothing is counted"
    assert not demand().told_pace and not demand().pace


def test_a_further_trainer_shortens_epochs_and_others_do_not() -> None:
    going = RunEstimate(12.0, trainers=3, monitors=1)
    assert demand(going=going).pace == 9.0 and demand(going=going, role="auxiliary").pace == 12.0
    assert demand(going=going).told_pace == 12.0, "what decides about seats is how fast the others are"
    assert demand(going=RunEstimate(0.0, trainers=3)).pace == 0


def test_in_groups_and_large_runs_nobody_passes_on_more_than_its_group_asks_for() -> None:
    many = RunEstimate(12.0, trainers=1 << 20, monitors=1 << 20, auxiliaries=1 << 20)
    for role in ("trainer", "monitor", "auxiliary"):
        sent, received = passed_on(many, role, 16)
        assert 0 < sent < 16 and 0 < received < 16
    alone = passed_on(RunEstimate(12.0, trainers=1), "trainer", None)
    assert alone == pytest.approx((1.0, 1.0)), "half to the other one, and half of the average"


CASES: list[tuple[Role, RunEstimate]] = [
    ("monitor", RunEstimate(trainers=2, auxiliaries=1)),
    ("trainer", RunEstimate(trainers=2, monitors=1, auxiliaries=1)),
    ("trainer", RunEstimate(trainers=1, monitors=1)),
    ("auxiliary", RunEstimate(trainers=2, monitors=1)),
]


@pytest.mark.parametrize(("role", "going"), [CASES[0], *soak(CASES[1:])])
def test_what_is_promised_for_an_hour_is_what_a_run_then_takes(
    role: Role, going: RunEstimate, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1_000
    links = {"bandwidth": 1.0}  # alike, as the promise assumes; what rounds in memory measure is chance
    monkeypatch.setattr(optim_swarm, "FEATURES", size)

    async def main() -> tuple[float, float, float, float]:
        async with optim_swarm.Swarm() as swarm:
            seeds = itertools.count(1)

            async def start(role: Role) -> tuple[Any, Callable[[int], Coroutine[Any, Any, None]]]:
                if role != "auxiliary":
                    made = await swarm.trainer(
                        seed=0, data_seed=next(seeds), pace=0.4, role=role, dtype=torch.float32, averaging=links
                    )
                    return made.node, made.follow if role == "monitor" else made.train
                config = OptimizerConfig("run", optim_swarm.TARGET, description=PeerDescription("auxiliary"))
                averaging = averager_config(config, auxiliary=True, options=links)
                peer = PeerContext(await swarm.node(), config, averaging)
                core = AuxiliaryCore(peer, [optim_swarm.make_model(0, torch.float32)])
                await core.start()
                assistants.append(core)

                async def assist(until: int) -> None:
                    while core.position.epoch < until:
                        await core.step()

                return core.node, assist

            assistants: list[AuxiliaryCore] = []
            counts = {"trainer": going.trainers, "monitor": going.monitors, "auxiliary": going.auxiliaries}
            there = [await start(each) for each, count in counts.items() for _ in range(count)]  # type: ignore[arg-type]
            epochs = optim_swarm.record(there[0][0], EpochAdvanced)
            await optim_swarm.together(*(work(6) for _, work in there))
            told = dataclasses.replace(going, epoch_seconds=statistics.median(e.seconds for e in epochs if e.samples))
            newcomer = await start(role)
            await optim_swarm.together(*(work(10) for _, work in (*there, newcomer)))  # it has come into step
            rounds, began = optim_swarm.record(newcomer[0], RoundFinished), asyncio.get_running_loop().time()
            await optim_swarm.together(*(work(22) for _, work in (*there, newcomer)))
            hours = (asyncio.get_running_loop().time() - began) / 3600
            for core in assistants:
                await core.shutdown()
        promised = demand(role=role, going=told, outline=nn.Linear(size, 1, bias=False, device="meta"))
        sent, received = (promised.an_hour(nbytes) * hours for nbytes in (promised.sent, promised.received))
        return sent, sum(r.bytes_sent for r in rounds), received, sum(r.bytes_received for r in rounds)

    sent, really_sent, received, really_received = virtual_time.run(main(), timeout=3600)
    assert 0.75 < sent / really_sent < 1.25 and 0.75 < received / really_received < 1.25
