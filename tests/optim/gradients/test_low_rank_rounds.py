"""Whole rounds of PowerSGD and PowerEF on the memory network: kills, failures, late members, replays, and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.exchange import PartExchange
from swarmcli.optim.modes.low_rank import LowRank, PowerEF, PowerSGD
from swarmcli.testing import virtual_time
from tests.averaging.averagers import Averagers, Peer, all_results
from tests.averaging.round.programs import strike_in_step
from tests.optim.gradients.low_rank_peers import Gradients, conclude, equal, join
from tests.suites import soak

MODES = [PowerSGD(averager_rank=2, min_compression_ratio=0.1), PowerEF(averager_rank=2, min_compression_ratio=0.1)]
both = pytest.mark.parametrize("mode", MODES, ids=["powersgd", "poweref"])


def run(main: Any, seed: int = 0) -> None:
    virtual_time.run(main, seed=seed, timeout=3600)


async def members(swarm: Averagers, mode: LowRank, count: int, **options: Any) -> list[tuple[Peer, Gradients]]:
    made = []
    for _ in range(count):
        gradients = Gradients(mode)
        made.append((await join(swarm, gradients, **options), gradients))
    return made


async def freeze(peers: list[tuple[Peer, Gradients]], seed: int) -> None:
    for index, (peer, gradients) in enumerate(peers):
        gradients.draw(seed + index, 1 + index)
        async with peer.core.tensors():
            gradients.freeze()


async def average(peers: list[tuple[Peer, Gradients]], **request: Any) -> list[RoundResult]:
    controls = [peer.begin(weight=float(g.method.samples), **request) for peer, g in peers]
    results = await all_results(controls)
    for (peer, gradients), result in zip(peers, results, strict=True):
        await conclude(peer, gradients, result)
    return results


def assert_alike(peers: list[tuple[Peer, Gradients]]) -> None:
    first = peers[0][1]
    for _, gradients in peers[1:]:
        assert equal(dict(gradients.method.shared), dict(first.method.shared))
        assert all(map(torch.equal, gradients.averaged, first.averaged))


@pytest.mark.parametrize(
    ("mode", "step"),
    [(MODES[0], 1), (MODES[1], 0), *soak([(MODES[0], 0), (MODES[1], 1)])],
    ids=["powersgd-1", "poweref-0", "powersgd-0", "poweref-1"],
)
def test_one_killed_in_the_middle_counts_as_if_it_had_brought_nothing(
    mode: LowRank, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The survivors step with what they would have without the killed one, and keep the residuals of that case."""

    async def main(after: float) -> bool:
        async with Averagers(2) as swarm:
            peers = await members(swarm, mode, 4)
            await freeze(peers, 0)
            dead = peers[3][0]
            survivors = peers[:3]
            with monkeypatch.context() as patch:
                strike_in_step(patch, step, dead, lambda: swarm.kill(dead), after, slow=swarm.network)
                controls = [peer.begin(weight=float(g.method.samples)) for peer, g in peers]
                results = await all_results(controls[:3])
            controls[3].cancel()
            for (peer, gradients), result in zip(survivors, results, strict=True):
                await conclude(peer, gradients, result)
            assert_alike(survivors)
            if dead.peer_id in results[0].contributors:
                return False
            assert all(result.total_weight == 6 for result in results)
            brought = [g for _, g in survivors]
            check_conserved(brought, [Gradients(mode).draw(index, 1) for index in range(3)])
            return True

    assert any(virtual_time.run(main(after), seed=0, timeout=3600) for after in (0.03, 0.1, 0.25)), "it was left out"


def check_conserved(peers: list[Gradients], drawn: list[list[torch.Tensor]]) -> None:
    """After a first round of members with 1, 2, 3 samples: the average and the residuals are of these alone."""
    for index, matrix in peers[0].method.matrices.items():
        total = sum((1 + i) * gradients[index] for i, gradients in enumerate(drawn))
        average = 6 * peers[0].averaged[index]
        assert isinstance(total, torch.Tensor)
        torch.testing.assert_close(
            matrix.p @ (matrix.p.t() @ total.reshape(matrix.mean.shape)), average.reshape(matrix.mean.shape)
        )
        if peers[0].method.own:
            held = sum(peer.method.own[f"residual{index}"] for peer in peers)
            torch.testing.assert_close(average.reshape(matrix.mean.shape) + held, total.reshape(matrix.mean.shape))


@both
def test_bytes_on_the_wire_are_those_of_the_formula(mode: LowRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of n members sends what others reduce, and its averages to n − 1: 2 (n − 1) times the vector in all."""
    shapes = [(300, 200), (64, 16, 3, 3), (500,)]
    rank = 2
    numbers = rank * (300 + 200) + rank * (64 + 144) + 500
    sizes, began = list[int](), PartExchange.gather

    async def counted(self: PartExchange) -> None:
        sizes.append(sum(part.descriptor.nbytes for part in self.holdings.plan.parts))
        await began(self)

    async def main() -> None:
        async with Averagers(6) as swarm:
            peers = []
            for _ in range(3):
                gradients = Gradients(mode, shapes, torch.float32)
                peers.append((await join(swarm, gradients, allreduce=AllreduceOptions()), gradients))
            for seed in (0, 10):
                sizes.clear()
                await freeze(peers, seed)
                results = await average(peers)
                again = rank * (300 + 64) if isinstance(mode, PowerEF) else 0  # P once more
                assert sum(sizes) == 3 * 4 * (numbers + again)
                wire = sum(result.bytes_sent for result in results)
                assert wire == 2 * (3 - 1) * 4 * (numbers + again)

    monkeypatch.setattr(PartExchange, "gather", counted)
    run(main())
