"""Trains in one process with members of whom some lie about their gradients, or about how far their own steps led them.

What every member sends is cut into parts by a real plan, and each part goes through a real aggregator; only the network
is left out, since rounds give all members the same average. Liars know what all honest members send.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.func import functional_call, grad, vmap

from benchmarks._convergence import BYTES, CONTEXT, Sources, draw
from swarmcli.averaging.aggregators import Aggregator
from swarmcli.averaging.round.buffers import Inputs
from swarmcli.averaging.round.plan import Layout, Plan
from swarmcli.optim import Outer

EMBEDDING, WIDTH = 8, 32
BATCH = 32  # windows of each member and epoch
EPOCHS, WARM_UP, RATE = 120, 10, 4e-3
PART_SIZE = 32 << 10
JUDGED = 4096  # windows
STALE = 20  # age in epochs of the gradients that `slow` liars send

Gradient = list[torch.Tensor]


class SmallModel(torch.nn.Module):
    """Predicts a byte from the eight before it; 12,576 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(BYTES, EMBEDDING)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(CONTEXT * EMBEDDING, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, BYTES)
        )

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        logits = self.layers(self.embedding(windows[:, :-1]).flatten(1))
        return torch.nn.functional.cross_entropy(logits, windows[:, -1])


@cache
def sources() -> Sources:
    return Sources.read()


# What liars send.


@dataclass
class Scene:
    """One epoch, as liars see it."""

    epoch: int
    honest: torch.Tensor  # (honest members, numel)
    mine: torch.Tensor  # (liars, numel) that they would send if they were honest
    past: list[torch.Tensor]  # what liars would have sent in the epochs before
    generator: torch.Generator

    @property
    def members(self) -> int:
        return len(self.honest) + len(self.mine)


def sign_flip(scene: Scene) -> torch.Tensor:
    """The opposite of their own gradients."""
    return -scene.mine


def scaled(scene: Scene) -> torch.Tensor:
    """The opposite, a hundred times as large."""
    return -100 * scene.mine


def noise(scene: Scene) -> torch.Tensor:
    """Random numbers, ten times as large as gradients."""
    sizes = scene.mine.norm(dim=1, keepdim=True) / math.sqrt(scene.mine.shape[1])
    return 10 * sizes * torch.randn(scene.mine.shape, generator=scene.generator)


def a_little(scene: Scene) -> torch.Tensor:
    """All liars send the same, just so far from the mean that enough honest members are further away (Baruch et al.,
    arXiv 1902.06156)."""
    liars, members = len(scene.mine), scene.members
    needed = members // 2 + 1 - liars
    z = statistics.NormalDist().inv_cdf((members - liars - needed) / (members - liars))
    return _aside(scene, max(z, 0.3))


def a_little_more(scene: Scene) -> torch.Tensor:
    """The same, two standard deviations from the mean: no longer hidden, and worse where numbers are not cut off."""
    return _aside(scene, 2.0)


def _aside(scene: Scene, z: float) -> torch.Tensor:
    return (scene.honest.mean(0) - z * scene.honest.std(0)).expand_as(scene.mine)


def inner_product(scene: Scene) -> torch.Tensor:
    """A little of the opposite of the mean (Xie et al., arXiv 1903.03936)."""
    return (-0.6 * scene.honest.mean(0)).expand_as(scene.mine)


def equivocation(scene: Scene) -> torch.Tensor:
    """Something else for every reducer: the gradient for one, the opposite for the next."""
    pieces = scene.mine.split(PART_SIZE // 4, dim=1)
    return torch.cat([piece if index % 2 else -piece for index, piece in enumerate(pieces)], dim=1)


def lazy(scene: Scene) -> torch.Tensor:
    """What they computed in the first epoch, again and again."""
    return scene.past[0]


def slow(scene: Scene) -> torch.Tensor:
    """What they computed for parameters of long ago."""
    return scene.past[max(0, len(scene.past) - 1 - STALE)]


ATTACKS: dict[str, Callable[[Scene], torch.Tensor]] = {
    "sign flip": sign_flip,
    "scaled": scaled,
    "random": noise,
    "a little is enough": a_little,
    "a little more": a_little_more,
    "inner product": inner_product,
    "equivocation": equivocation,
    "lazy": lazy,
    "slow": slow,
}


# Training


@dataclass(frozen=True)
class Case:
    """A run of `members`, of whom `liars` lie by `attack`. `momentum`: that of the running mean of its gradients that a
    member sends. `steps`: inner steps of a member in an epoch, which then sends how far they led it; 0: gradients are
    sent."""

    aggregator: Aggregator
    attack: str
    liars: int
    members: int
    seed: int = 0
    momentum: float = 0.0
    steps: int = 0


def train(case: Case) -> list[float]:
    """Returns the loss on text that nobody trains on, in nats per byte, after every tenth epoch."""
    torch.manual_seed(case.seed)
    torch.set_num_threads(1)
    model = SmallModel()
    parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    if case.steps:
        optimizer = Outer(1, "nesterov").make(parameters)
    generator = torch.Generator().manual_seed(case.seed + 1)
    shapes = [p.shape for p in parameters]

    def loss_of(weights: dict[str, torch.Tensor], windows: torch.Tensor) -> torch.Tensor:
        return functional_call(model, weights, (windows,))

    gradients = vmap(grad(loss_of), in_dims=(0 if case.steps else None, 0))
    own = OwnSteps(case.members, [p.detach() for p in parameters])
    past: list[torch.Tensor] = []
    running = torch.zeros(case.members, sum(p.numel() for p in parameters))
    judged = draw(sources().judging, JUDGED, torch.Generator().manual_seed(7))
    curve: list[float] = []
    for epoch in range(EPOCHS):
        rate = RATE * min(1.0, (epoch + 1) / WARM_UP) * (1 - 0.9 * epoch / EPOCHS)
        own.begin([p.detach() for p in parameters])
        for _ in range(max(1, case.steps)):
            windows = draw(sources().training, case.members * BATCH, generator)
            weights = dict(zip(names, own.weights if case.steps else [p.detach() for p in parameters], strict=True))
            found = gradients(weights, windows.view(case.members, BATCH, -1))
            flat = torch.cat([found[name].flatten(1) for name in names], dim=1)
            if case.steps:
                own.step(flat, rate)
        if case.steps:
            flat = own.moved / case.steps
        running = case.momentum * running + (1 - case.momentum) * flat
        sent = (running / (1 - case.momentum ** (epoch + 1))).clone()
        if case.liars:
            scene = Scene(epoch, sent[case.liars :], sent[: case.liars].clone(), past, generator)
            past.append(scene.mine)
            sent[: case.liars] = ATTACKS[case.attack](scene)
        average = aggregate(case.aggregator, sent, shapes)
        for parameter, value in zip(parameters, average, strict=True):
            parameter.grad = value * max(1, case.steps)
        if not case.steps:
            for group in optimizer.param_groups:
                group["lr"] = rate
        optimizer.step()
        if (epoch + 1) % 10 == 0:
            with torch.no_grad():
                loss = functional_call(model, dict(zip(names, parameters, strict=True)), (judged,)).item()
            curve.append(loss if math.isfinite(loss) else math.inf)
    return curve


class OwnSteps:
    """The inner steps of all members at once, by Adam with statistics of each member's own."""

    def __init__(self, members: int, parameters: Sequence[torch.Tensor]) -> None:
        self._shapes = [p.shape for p in parameters]
        numel = sum(p.numel() for p in parameters)
        self._first, self._second, self._count = torch.zeros(members, numel), torch.zeros(members, numel), 0

    def begin(self, anchor: Sequence[torch.Tensor]) -> None:
        self._anchor = torch.cat([p.flatten() for p in anchor])
        self._flat = self._anchor.expand_as(self._first).clone()

    def step(self, gradients: torch.Tensor, rate: float) -> None:
        self._count += 1
        self._first.lerp_(gradients, 0.1)
        self._second.lerp_(gradients.square(), 0.05)
        first, second = self._first / (1 - 0.9**self._count), self._second / (1 - 0.95**self._count)
        self._flat -= rate * first / (second.sqrt() + 1e-8)

    @property
    def weights(self) -> list[torch.Tensor]:
        """One tensor for each parameter, (members, …)."""
        pieces = self._flat.split([math.prod(shape) for shape in self._shapes], dim=1)
        return [piece.reshape(-1, *shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    @property
    def moved(self) -> torch.Tensor:
        return self._anchor - self._flat


def aggregate(aggregator: Aggregator, sent: torch.Tensor, shapes: Sequence[torch.Size]) -> Gradient:
    """Returns the average of what was sent, (members, numel), as one tensor for each shape: as in a round where every
    member reduces its share."""
    tensors = [
        [piece.view(shape) for piece, shape in zip(row.split([s.numel() for s in shapes]), shapes, strict=True)]
        for row in sent
    ]
    members = len(sent)
    plan = Plan.make(Layout.of(tensors[0]), [1.0] * members, PART_SIZE)
    inputs = [Inputs(each) for each in tensors]
    averages = []
    for part in plan.parts:
        reducing = aggregator.part(torch.empty(part.descriptor.numel), members)
        for member, mine in enumerate(inputs):
            reducing.add(mine.part(part), 1.0, member)
        averages.append(reducing.finish()[0])
    flat = torch.cat(averages)
    return [piece.view(shape) for piece, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
