"""The training loop that this project and hivemind run alike in benchmarks/optimizer.py. Needs nothing but torch.

A batch is a forward and a backward pass and then sleep, as if an accelerator computed: so what a trainer loses beside
its own computing shows even where there are more trainers than processors.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

GPT2_LAYERS, GPT2_WIDTH, GPT2_WORDS, GPT2_CONTEXT = 12, 768, 50257, 1024


@dataclass(frozen=True)
class Work:
    """What each trainer does: so many batches make its share of an epoch, and each takes so long."""

    model: str  # "small" or "gpt2"
    peers: int
    batches: int  # per epoch and trainer
    seconds: float  # that a batch takes
    epochs: int
    uncounted: int = 2  # epochs at the beginning, while the peers find each other
    batch_size: int = 8
    matchmaking_time: float | None = None  # None: the default
    rank: int | None = None  # of PowerSGD

    @property
    def target(self) -> int:
        return self.peers * self.batches * self.batch_size

    @property
    def computing(self) -> float:
        """Seconds per epoch that the trainers need at least."""
        return self.batches * self.seconds


@dataclass(frozen=True)
class Epoch:
    """An epoch of one trainer, from the end of the epoch before to its own end."""

    seconds: float
    inside: float  # seconds of it in step()
    batches: int


def small_model() -> torch.nn.Module:
    """About 26,000 parameters."""
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.Linear(128, 10)
    )


def gpt2_shapes() -> list[tuple[int, ...]]:
    """The shapes of GPT-2's 124 million parameters: embeddings, and per layer norms, attention and the feed-forward
    block."""
    width = GPT2_WIDTH
    layer = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(GPT2_WORDS, width), (GPT2_CONTEXT, width), *layer * GPT2_LAYERS, (width,), (width,)]


def parameters_of(model: str) -> tuple[list[torch.nn.Parameter], Callable[[], None]]:
    """Returns parameters, and a function that computes a batch's gradients. GPT-2's gradients are drawn once: only
    their size matters here."""
    torch.manual_seed(0)
    if model == "small":
        network = small_model()
        inputs, labels = torch.randn(8, 64), torch.randint(10, (8,))

        def compute() -> None:
            network.zero_grad()
            torch.nn.functional.cross_entropy(network(inputs), labels).backward()

        return list(network.parameters()), compute
    parameters = [torch.nn.Parameter(torch.randn(shape).mul_(0.02)) for shape in gpt2_shapes()]
    gradients = [torch.randn_like(parameter) for parameter in parameters]

    def give() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    return parameters, give


def train(optimizer: Any, compute: Callable[[], None], work: Work) -> list[Epoch]:
    """Trains for `work.epochs` epochs and returns those that count."""
    ended: list[Epoch] = []
    began, inside, batches = time.perf_counter(), 0.0, 0
    while len(ended) < work.epochs:
        before, due = optimizer.local_epoch, time.perf_counter() + work.seconds
        compute()
        time.sleep(max(0.0, due - time.perf_counter()))
        stepping = time.perf_counter()
        optimizer.step(batch_size=work.batch_size)
        now = time.perf_counter()
        inside, batches = inside + now - stepping, batches + 1
        if optimizer.local_epoch != before:
            ended.append(Epoch(now - began, inside, batches))
            began, inside, batches = now, 0.0, 0
    return ended[work.uncounted :]


def own_step(work: Work, turns: int = 5) -> float:
    """Seconds that the bare optimizer's step takes here: the part of an epoch that nobody can save."""
    parameters, compute = parameters_of(work.model)
    optimizer = torch_optimizer(parameters)
    compute()
    optimizer.step()
    best = float("inf")
    for _ in range(turns):
        began = time.perf_counter()
        optimizer.step()
        best = min(best, time.perf_counter() - began)
    return best


def torch_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-6, momentum=0.9)


def begin_process() -> None:
    """Takes half of the processors for torch's threads, so that two trainers together have no more threads than there
    are processors."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))


def time_steps(optimizer: Any, parameters: list[torch.nn.Parameter], work: Work) -> tuple[float, float]:
    """Median seconds of a step() that only accumulates, and of one bare addition over the gradients, which take turns.

    The epoch must be far from its end.
    """
    sums = [torch.zeros_like(parameter) for parameter in parameters]

    def add() -> None:
        with torch.no_grad():
            for total, parameter in zip(sums, parameters, strict=True):
                total.add_(parameter.grad, alpha=work.batch_size)

    steps, additions = [], []
    for _ in range(work.batches):
        steps.append(_timed(lambda: optimizer.step(batch_size=work.batch_size)))
        additions.append(_timed(add))
        time.sleep(work.seconds)
    return statistics.median(steps[1:]), statistics.median(additions[1:])


def _timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
