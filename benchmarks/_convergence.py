"""What compressed gradients cost in learning: a byte-level language model on Python's own sources, in one process.

Three peers with batches of unequal sizes hold one model. Their gradients go through the very methods that the Optimizer
uses; only the network is left out, since all-reduces are exact. What is printed is the loss on sources that no peer
trains on, after the same number of epochs, beside that of plain averaging from the same start with the same batches.
"""

from __future__ import annotations

import math
import statistics
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from swarmcli.averaging.round.program import advance
from swarmcli.optim.gradients.accumulator import GradientAccumulator, GradientMethod
from swarmcli.optim.modes.low_rank import PowerEF, PowerSGD

BYTES, CONTEXT, EMBEDDING, WIDTH = 256, 8, 16, 128
BATCHES = (1024, 640, 384)  # samples of each peer per epoch
EPOCHS, WARM_UP = 300, 20
PEAK_RATE = 0.05
TOLERANCE = 0.01  # of the plain loss

MethodFactory = Callable[[Sequence[torch.Tensor]], GradientMethod]


class ByteModel(torch.nn.Module):
    """Predicts a byte from the eight before it. Matrices of 128 x 128 and 256 x 128."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(BYTES, EMBEDDING)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(CONTEXT * EMBEDDING, WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(WIDTH, BYTES),
        )

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean nats per byte over windows (samples, CONTEXT + 1) of byte values."""
        embedded = self.embedding(windows[:, :-1]).flatten(1)
        return torch.nn.functional.cross_entropy(self.layers(embedded), windows[:, -1])


@dataclass(frozen=True)
class Sources:
    """Windows of the standard library's text: every tenth file is for judging only."""

    training: torch.Tensor  # (bytes,)
    judging: torch.Tensor

    @classmethod
    def read(cls, files: int = 120) -> Sources:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]
        texts = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long() for path in paths]
        texts = [text for text in texts if len(text) > CONTEXT]
        judging = [text for index, text in enumerate(texts) if index % 10 == 0]
        return cls(torch.cat([text for index, text in enumerate(texts) if index % 10]), torch.cat(judging))

    def judge(self, model: ByteModel, samples: int = 16384) -> float:
        windows = draw(self.judging, samples, torch.Generator().manual_seed(0))
        with torch.no_grad():
            return float(model.loss(windows))


def draw(text: torch.Tensor, samples: int, generator: torch.Generator) -> torch.Tensor:
    begins = torch.randint(len(text) - CONTEXT, (samples, 1), generator=generator)
    return text[begins + torch.arange(CONTEXT + 1)]


def make_optimizer(model: ByteModel) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=PEAK_RATE, momentum=0.9)


def rate_at(epoch: int) -> float:
    if epoch < WARM_UP:
        return (epoch + 1) / WARM_UP
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (epoch - WARM_UP) / (EPOCHS - WARM_UP)))


def average(methods: Sequence[GradientMethod], weights: Sequence[float], seed: bytes) -> None:
    """A round of these peers, without a network: every phase is a weighted mean of what they bring to it."""
    programs = [method.program for method in methods]
    if programs[0] is None:
        for tensors in zip(*(method.tensors for method in methods), strict=True):
            mean = weighted_mean(tensors, weights)
            for tensor in tensors:
                tensor.copy_(mean)
        return
    runs = [program.run(seed) for program in programs if program is not None]
    steps = [advance(run, None) for run in runs]
    while not steps[0][1]:
        averages = [weighted_mean(tensors, weights) for tensors in zip(*(brought for brought, _ in steps), strict=True)]
        steps = [advance(run, averages) for run in runs]
    for method, (results, _) in zip(methods, steps, strict=True):
        for tensor, result in zip(method.tensors, results, strict=True):
            tensor.copy_(result)


def weighted_mean(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    total = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        total.add_(tensor, alpha=weight / sum(weights))
    return total


@torch.no_grad()
def exchange(accumulators: Sequence[GradientAccumulator], methods: Sequence[GradientMethod], seed: bytes) -> None:
    """All peers hand in what they have; afterwards the averages are the gradients of the model."""
    weights = [accumulator.freeze().weight for accumulator in accumulators]
    for method, weight in zip(methods, weights, strict=True):
        method.load(weight)
    average(methods, weights, seed)
    for method, accumulator in zip(methods, accumulators, strict=True):
        method.finish(sum(weights), counted=True)
        accumulator.settle()
    for parameter, gradient in zip(accumulators[0].parameters, methods[0].averaged, strict=True):
        parameter.grad = gradient.clone()


def train(make: MethodFactory, sources: Sources, seed: int) -> float:
    """The loss on sources for judging, in nats per byte, after EPOCHS epochs of all peers."""
    torch.manual_seed(seed)
    model, generator = ByteModel(), torch.Generator().manual_seed(seed)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
    accumulators = [GradientAccumulator(list(model.parameters())) for _ in BATCHES]
    methods = [make(accumulator.means) for accumulator in accumulators]
    for epoch in range(EPOCHS):
        for accumulator, samples in zip(accumulators, BATCHES, strict=True):
            model.zero_grad()
            model.loss(draw(sources.training, samples, generator)).backward()
            accumulator.add(samples)
        exchange(accumulators, methods, b"epoch %d" % epoch)
        optimizer.step()
        scheduler.step()
    return sources.judge(model)


METHODS: dict[str, MethodFactory] = {
    "plain": GradientMethod,
    "PowerSGD, rank 8": PowerSGD(averager_rank=8).method,
    "PowerSGD, rank 32": PowerSGD(averager_rank=32).method,
    "PowerEF, rank 8": PowerEF(averager_rank=8).method,
    "PowerEF, rank 32": PowerEF(averager_rank=32).method,
}


def compare(seeds: Sequence[int]) -> None:
    sources = Sources.read()
    plain = [train(GradientMethod, sources, seed) for seed in seeds]
    print(f"  {'plain':20}{statistics.fmean(plain):.4f} nats per byte, mean of {len(seeds)} seeds", flush=True)
    for name, make in METHODS.items():
        if name != "plain":
            losses = [train(make, sources, seed) for seed in seeds]
            more = [loss / usual - 1 for loss, usual in zip(losses, plain, strict=True)]
            met = statistics.fmean(more) <= TOLERANCE
            each = ", ".join(f"{part:+.2%}" for part in more)
            print(
                f"  {name:20}{statistics.fmean(losses):.4f}, beside plain {statistics.fmean(more):+.2%} ({each}); "
                f"target {TOLERANCE:.0%}: {'met' if met else 'MISSED'}",
                flush=True,
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    compare((1, 2))
