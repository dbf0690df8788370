"""Trainers whose optimizer lives beside the model, and the one-process computation that they have to equal."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from swarmcli.dht import DHTNode
from swarmcli.optim.modes.base import Timing
from swarmcli.optim.modes.gradients import Mode
from tests.optim.optim_swarm import FEATURES, Swarm, Trainer, decay, loss_of, make_model, momentum


class DelayedTrainer(Trainer):
    """A trainer whose optimizer is offloaded; in the end it knows which rows went into which epoch."""

    def __init__(self, node: DHTNode, timing: Timing, **options: Any) -> None:
        super().__init__(node, mode=Mode(timing=timing), offload=True, **options)
        self.rows: list[torch.Tensor] = []  # every batch, in order
        self.ahead: list[int] = []  # samples taken in while the end of an epoch was under way, after each such step
        self.waits: list[float] = []  # seconds in each step

    @property
    def host_weights(self) -> torch.Tensor:
        """The parameters that the optimizer steps."""
        return self.core.replica.state.parameters[0].detach().clone()

    async def compute(self, rows: int | None = None) -> None:
        """Computes one batch and steps; takes `pace` seconds and the time that the step waits."""
        batch = torch.randn(rows or self.batch_size, FEATURES, dtype=torch.float64, generator=self.data)
        self.weights.grad = None
        loss_of(self.weights, batch).backward()
        before = self.weights.detach().clone()
        await asyncio.sleep(self.pace)
        assert torch.equal(self.weights, before), "the model changed while it computed"
        self.rows.append(batch)
        under_way, epoch = self.core._end.under_way, self.epoch
        began = asyncio.get_running_loop().time()
        await self.core.step(len(batch))
        self.waits.append(asyncio.get_running_loop().time() - began)
        if under_way and self.core._end.under_way and self.epoch == epoch:
            self.ahead.append(self.core.work.samples)

    def rows_by_epoch(self) -> list[torch.Tensor]:
        """The rows of this peer in each epoch's average, as the events count them: batches go in one after another."""
        rows = torch.cat(self.rows)
        sizes = [event.own_samples for event in self.epochs]
        assert sum(sizes) <= len(rows), "something was counted twice"
        return list(torch.split(rows[: sum(sizes)], sizes))


class DelayedSwarm(Swarm):
    """A Swarm of delayed trainers."""

    async def delayed(self, timing: Timing, **options: Any) -> DelayedTrainer:
        return await self.add(DelayedTrainer(await self.node(), timing, **options))

    def batches(self, epochs: int) -> list[torch.Tensor]:
        """Everything that went into each epoch."""
        used = [trainer.rows_by_epoch() for trainer in self.trainers]
        return [torch.cat([rows[epoch] for rows in used]) for epoch in range(epochs)]


def one_round_late(seed: int, epochs: list[torch.Tensor], make=momentum, scheduler=decay) -> torch.Tensor:
    """The weights of one process whose gradients are of the weights before the last step."""
    weights = make_model(seed)
    computed_with = make_model(seed)
    optimizer = make([weights])
    schedule = scheduler(optimizer)
    for rows in epochs:
        computed_with.grad = None
        loss_of(computed_with, rows).backward()
        weights.grad = computed_with.grad
        with torch.no_grad():
            computed_with.copy_(weights)
        optimizer.step()
        schedule.step()
    return weights.detach()
