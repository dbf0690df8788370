"""Sparse gradients: error feedback adds up, also of a round that is replayed. Whole runs: test_mode_faults.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.events import Noticed
from swarmcli.optim.arguments import averager_config
from swarmcli.optim.config import OptimizerConfig, PeerContext, PeerDescription
from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.gradients.sparse_method import SparseMethod
from swarmcli.optim.modes.base import Trained
from swarmcli.optim.modes.sparse import Sparse
from tests.optim.optim_swarm import Swarm, record
from tests.simulation import within

TARGET, WIDTH = 24, 60  # the matrix is more than a chunk
MODE = Sparse(k=64, bits=2, decay=1.0)


class Sower:
    """A peer that fits a matrix, of which a round carries 128 of 7,200 elements."""

    def __init__(self, node: Any) -> None:
        self.node, self.parameters = node, [torch.nn.Parameter(torch.zeros(WIDTH, 2 * WIDTH))]
        self.data = torch.Generator().manual_seed(1)
        config = OptimizerConfig("run", TARGET, description=PeerDescription("trainer"))
        optimizer = torch.optim.SGD(self.parameters, lr=0.02)
        self.core = OptimizerCore(PeerContext(node, config, averager_config(config)), Trained(optimizer), MODE)
        self.method = self.core.work.method


def loaded(method: SparseMethod, values: torch.Tensor, samples: float) -> torch.Tensor:
    method.averaged[0].copy_(values)
    method.load(samples)
    return method.tensors[0].clone()


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_each_coordinate_is_sent_decayed_or_left(decay: float) -> None:
    """Whole numbers: sums of them are exact, so what is not equal is counted twice or lost."""
    method = Sparse(k=32, bits=1, decay=decay).method([torch.zeros(5000)])
    generator = torch.Generator().manual_seed(1)
    came, sent, decayed = (torch.zeros(5000, dtype=torch.float64) for _ in range(3))
    for turn in range(20):
        samples, counted = float(turn % 3), turn % 4 != 3
        mean = torch.randint(-50, 50, (5000,), generator=generator).float()
        residual = method.own["residual0"].double().clone()
        message = loaded(method, mean, samples)
        assert torch.equal(loaded(method, mean, samples), message)  # a round that failed changed nothing
        assert message.count_nonzero() <= 64
        method.finish(samples, counted)
        if counted and samples:
            came += mean.double() * samples
            sent += message.double() * samples
            decayed += residual * (1 - decay)
        else:
            assert torch.equal(method.own["residual0"].double(), residual)  # given back
    left = method.own["residual0"].double()
    torch.testing.assert_close(sent + left + decayed, came, rtol=0, atol=5e-3)
    assert "error feedback of this peer is lost" in method.reset_own() and not method.reset_own()
    assert not method.own["residual0"].any()


def test_a_round_steps_with_what_was_sent_over_the_samples_of_all() -> None:
    """The message is exactly what others decode: a second trip changes no bit."""
    method = MODE.method([torch.zeros(5000)], [torch.ones(3)])
    message = loaded(method, torch.randn(5000, generator=torch.Generator().manual_seed(2)), 7.0)
    assert torch.equal(MODE.codec.extract(MODE.codec.compress(message)), message)
    method.tensors[0].mul_(0.5)  # the average with a peer that sent nothing
    method.finish(14.0, counted=True)
    assert torch.equal(method.averaged[0], message * 0.5)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("counted", [True, False])
@within(100)
async def test_a_round_that_is_replayed_takes_what_it_counted_of_the_error_feedback(counted: bool, again: bool) -> None:
    """Otherwise the next round would send the same again."""
    async with Swarm() as swarm:
        late = await swarm.add(Sower(await swarm.node()))
        work, notices = late.core.work, record(late.node, Noticed)
        gradient = late.parameters[0].grad = torch.randn(WIDTH, 2 * WIDTH, generator=late.data)
        await work.accumulate(4)
        await work.freeze()
        message = late.method.tensors[0].clone()
        await work.set_aside()  # the outcome is not known here
        assert work.samples == 4, "gradients count for the next round of this position"
        if again:  # another round of this position has not come about either
            late.parameters[0].grad = torch.randn(WIDTH, 2 * WIDTH, generator=late.data)
            await work.accumulate(4)
            await work.freeze()
            await work.restore()
        contributor = late.node.peer_id if counted else swarm.contact.peer_id  # type: ignore[union-attr]
        own = {contributor: 4.0}
        await work.replay([message], RoundResult(round_id=bytes(32), weights=own, samples=own))
        left = 4 * (gradient - message) if counted else torch.zeros_like(message)
        torch.testing.assert_close(late.method.own["residual0"], left)
        lost = 4 * (not counted) + 4 * again
        told = [notice.text for notice in notices if "samples of this peer are lost" in notice.text]
        assert [text.split()[0] for text in told] == ([str(lost)] if lost else [])


@within(100)
async def test_an_auxiliary_gets_what_trainers_send_in_the_form_in_which_they_send_it() -> None:
    async with Swarm() as swarm:
        sower = Sower(await swarm.node())
        node = await swarm.node()
        config = OptimizerConfig("run", TARGET, description=PeerDescription("auxiliary"))
        parameters = list(sower.core.work.replica.placement.model_parameters)
        assisting = MODE.assisting_averager(node, averager_config(config, auxiliary=True), parameters)
        assert assisting.layout.codecs_hash == sower.core.work.averager.layout.codecs_hash
        assert assisting.layout.schema_hash == sower.core.work.averager.layout.schema_hash
