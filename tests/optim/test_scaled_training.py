"""Training with scaled losses: the same as without, and an overflow costs its peer's batches and nobody else's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from swarmcli import GradScaler
from swarmcli.dht import DHT, DHTNode
from swarmcli.errors import GradScalerError, OptimizerError
from swarmcli.events import Noticed
from swarmcli.optim import Optimizer
from swarmcli.optim.modes.gradients import Mode
from tests.optim.optim_swarm import (
    FEATURES,
    Swarm,
    Trainer,
    digests,
    loss_of,
    record,
    reference,
    together,
)
from tests.optim.shells import dhts
from tests.simulation import simulated
from tests.suites import soak

SCALE = 2.0**16
Overflows = Callable[["ScaledTrainer"], bool]


class ScaledTrainer(Trainer):
    """Multiplies its losses by `scale`; where `overflows` says so a loss is infinite. Lost work halves `scale`."""

    def __init__(self, node: DHTNode, *, reuse: bool = False, overflows: Overflows = lambda trainer: False) -> None:
        super().__init__(node, mode=Mode(reuse_grad_buffers=reuse))
        self.scale, self.reuse, self.overflows, self.lost = SCALE, reuse, overflows, 0

    async def compute(self, rows: int | None = None) -> None:
        await asyncio.sleep(self.pace)
        batch = torch.randn(self.batch_size, FEATURES, dtype=torch.float64, generator=self.data)
        bad = self.overflows(self)
        if not self.reuse:
            self.weights.grad = None
        (loss_of(self.weights, batch) * self.scale * (math.inf if bad else 1.0)).backward()
        self.pending.append(batch)
        lost = self.core.work.given_up.count
        step = self.core.step(len(batch), self.scale)
        if not bad:
            return await self._stepped(step)
        self.pending, moved = [], await step
        self.lost += self.core.work.given_up.count - lost
        if self.lost and not self.core.work.samples:
            self.scale /= 2
        assert not moved or not self.epochs[-1].own_samples


@pytest.mark.parametrize("reuse", [False, *soak([True])])
@simulated
async def test_an_overflow_on_one_peer_drops_what_that_peer_has_and_nobody_waits(reuse) -> None:
    async with Swarm() as swarm:
        unlucky = ScaledTrainer(await swarm.node(), reuse=reuse, overflows=lambda t: t.epoch == 2 and not t.lost)
        await swarm.add(unlucky)
        lucky = await swarm.add(ScaledTrainer(await swarm.node(), reuse=reuse))
        notices = record(unlucky.node, Noticed)
        await together(unlucky.train(6), lucky.train(6))
        assert unlucky.lost == 1 and unlucky.core.work.given_up.count == 1 and lucky.core.work.given_up.count == 0
        assert (unlucky.scale, lucky.scale) == (SCALE / 2, SCALE)
        assert any("scaled by 65536, are not finite" in notice.text for notice in notices)
        assert len(digests(swarm.trainers)) == 1
        expected = reference(0, swarm.batches(6))
        torch.testing.assert_close(lucky.weights.detach(), expected, rtol=1e-12, atol=1e-14)
        assert all(epoch.samples > 0 for epoch in lucky.epochs)


def model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1, dtype=dtype)


def optimizer(dht: Any, net: torch.nn.Module, **options: Any) -> Optimizer:
    settings: dict[str, Any] = {"run_id": "scaled", "target_batch_size": 16, "batch_size_per_step": 4}
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    if options.get("delay_optimizer_step"):
        settings |= {"optimizer": sgd, "params": list(net.parameters()), "offload_optimizer": True}
    else:
        settings["optimizer"] = sgd(net.parameters())
    return Optimizer(dht=dht, **settings | options)


def backward(net: torch.nn.Module, scaler: GradScaler | None, rows: torch.Tensor, times: float = 1.0) -> None:
    loss = ((net(rows) - rows.sum(1, keepdim=True)) ** 2).mean() * times
    (loss if scaler is None else scaler.scale(loss)).backward()


def batches(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(data: torch.Generator, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=data).to(dtype)


def train_alone(dht: Any, scaler: GradScaler | None, epochs: int, *, clip: bool = False, **options: Any) -> list[Any]:
    """The parameters of one peer after some epochs of four batches each.

    Where the end of an epoch is delayed, it lands after exactly one more batch was computed: saving waits for it.
    """
    net, data = model(), batches(1)
    opt = optimizer(dht, net, run_id=f"alone {scaler is None}", **options)
    try:
        for _ in range(4 * epochs):
            if not options.get("reuse_grad_buffers"):
                opt.zero_grad()
            backward(net, scaler, rows_of(data))
            opt.state_dict()
            if clip:
                if scaler is not None:
                    scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            if scaler is None:
                opt.step()
            else:
                scaler.step(opt)
                scaler.update()
        opt.state_dict()
        assert opt.local_epoch == epochs
        return [parameter.detach().clone() for parameter in net.parameters()]
    finally:
        opt.shutdown()


@pytest.mark.parametrize(
    "options",
    [
        {"clip": True},
        {"grad_averager": None},
        {"delay_grad_averaging": True, "delay_optimizer_step": True, "reuse_grad_buffers": True},
        *soak([{}, {"reuse_grad_buffers": True}, {"delay_optimizer_step": True}]),
    ],
    ids=str,
)
def test_the_loop_of_anyones_script(dht: DHT, options) -> None:
    without = train_alone(dht, None, 5, **options)
    scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    scaled = train_alone(dht, scaler, 5, **options)
    torch.testing.assert_close(scaled, without, rtol=0, atol=0)
    assert scaler.get_scale() / SCALE == 4  # doubled after the second and the fourth epoch


def test_what_an_optimizer_refuses_of_scalers() -> None:
    with dhts(2) as (dht, other), ExitStack() as stack:
        net = model()
        opt = optimizer(dht, net)
        stack.callback(opt.shutdown)
        scaler = GradScaler("cpu")
        backward(net, scaler, torch.ones(4, 4, dtype=torch.float64))
        with pytest.raises(OptimizerError, match=r"swarmcli\.GradScaler"):
            opt.step(grad_scaler=torch.amp.GradScaler("cpu"))
        scaler.step(opt)
        with pytest.raises(GradScalerError, match=r"grad_scaler\.step"):
            opt.step()
        opt.step(batch_size=0)
        with scaler.running_global_step(), pytest.raises(GradScalerError, match="by itself"):
            scaler.step(opt)
        helper = optimizer(other, model(), auxiliary=True, batch_size_per_step=None)
        stack.callback(helper.shutdown)
        with pytest.raises(OptimizerError, match="only assists"):
            helper.step(grad_scaler=scaler)
