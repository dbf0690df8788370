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
from swarmcli.dht import DHTNode
from swarmcli.errors import GradScalerError, OptimizerError
from swarmcli.events import Noticed
from swarmcli.optim import Optimizer
from swarmcli.optim.arguments import averager_config
from swarmcli.optim.config import OptimizerConfig, PeerContext
from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.modes.base import Trained
from swarmcli.optim.modes.gradients import Mode
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import (
    FEATURES,
    TARGET,
    Swarm,
    Trainer,
    adamw,
    decay,
    digests,
    loss_of,
    momentum,
    record,
    reference,
    together,
)
from tests.optim.shells import dhts
from tests.suites import soak

SCALE = 2.0**16
Overflows = Callable[["ScaledTrainer"], bool]


class ScaledTrainer(Trainer):
    """Its losses are multiplied by `scale` (None: it has no scaler); where `overflows` says so, a gradient is not
    finite, and the scale is halved as a scaler would."""

    def __init__(
        self,
        node: DHTNode,
        scale: float | None,
        *,
        reuse: bool = False,
        overflows: Overflows = lambda trainer: False,
        make: Callable[..., torch.optim.Optimizer] = momentum,
        **options: Any,
    ) -> None:
        super().__init__(node, make=make, **options)
        config = OptimizerConfig("run", TARGET)
        optimizer = make([self.weights])
        mode = Mode(reuse_grad_buffers=reuse)
        peer = PeerContext(node, config, averager_config(config))
        self.core = OptimizerCore(peer, Trained(optimizer, decay(optimizer)), mode)
        self.scale, self.reuse, self.overflows = scale, reuse, overflows
        self.batches = self.lost = 0

    async def compute(self, rows: int | None = None) -> None:
        await asyncio.sleep(self.pace)
        batch = torch.randn(rows or self.batch_size, FEATURES, dtype=torch.float64, generator=self.data)
        self.batches += 1
        bad = self.overflows(self)
        if not self.reuse:
            self.weights.grad = None
        (loss_of(self.weights, batch) * (self.scale or 1.0) * (math.inf if bad else 1.0)).backward()
        self.pending.append(batch)
        lost = self.core.work.given_up.count
        step = self.core.step(len(batch), self.scale)
        if not bad:
            return await self._stepped(step)
        self.pending, moved = [], await step
        self.lost += self.core.work.given_up.count - lost
        if self.lost and self.scale is not None and not self.core.work.samples:
            self.scale /= 2
        assert not moved or not self.epochs[-1].own_samples


async def trained(swarm: Swarm, *trainers: ScaledTrainer, until: int) -> None:
    for trainer in trainers:
        await trainer.core.start()
        swarm.trainers.append(trainer)
    await together(*(trainer.train(until) for trainer in trainers))


@pytest.mark.parametrize(
    ("make", "reuse"), [(adamw, True), *soak([(momentum, False), (momentum, True), (adamw, False)])]
)
def test_training_with_scaled_losses_is_training_without_to_the_last_bit(make, reuse) -> None:
    async def main(scales: tuple[float | None, float | None]) -> set[str]:
        async with Swarm() as swarm:
            made = [
                ScaledTrainer(await swarm.node(), scale, reuse=reuse, make=make, batch_size=size)
                for scale, size in zip(scales, (4, 3), strict=True)
            ]
            await trained(swarm, *made, until=3)
            expected = reference(0, swarm.batches(3), make=make)
            torch.testing.assert_close(made[0].weights.detach(), expected, rtol=1e-12, atol=1e-14)
            return digests(made)

    without = virtual_time.run(main((None, None)), seed=5)
    assert len(without) == 1
    assert virtual_time.run(main((SCALE, 2.0**-3)), seed=5) == without, "each peer has a scale of its own"


@pytest.mark.parametrize("reuse", [False, *soak([True])])
def test_an_overflow_on_one_peer_drops_what_that_peer_has_and_nobody_waits(reuse) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            unlucky = ScaledTrainer(
                await swarm.node(), SCALE, reuse=reuse, overflows=lambda t: t.epoch == 2 and not t.lost
            )
            lucky = ScaledTrainer(await swarm.node(), SCALE, reuse=reuse)
            notices = record(unlucky.node, Noticed)
            await trained(swarm, unlucky, lucky, until=6)
            assert unlucky.lost == 1 and unlucky.core.work.given_up.count == 1 and lucky.core.work.given_up.count == 0
            assert (unlucky.scale, lucky.scale) == (SCALE / 2, SCALE)
            assert any("scaled by 65536, are not finite" in notice.text for notice in notices)
            assert len(digests(swarm.trainers)) == 1
            expected = reference(0, swarm.batches(6))
            torch.testing.assert_close(lucky.weights.detach(), expected, rtol=1e-12, atol=1e-14)
            assert all(epoch.samples > 0 for epoch in lucky.epochs)

    virtual_time.run(main(), seed=1)


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
def test_the_loop_of_anyones_script(options) -> None:
    with dhts(1) as (dht,):
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
