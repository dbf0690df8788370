"""Lies about gradients: members that follow the protocol to the letter, and send something else than they computed.

No average tells them from honest members with other data. What they get is bounded by the run's aggregator.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from swarmcli.averaging.round.buffers import Inputs
from swarmcli.averaging.round.plan import Part
from tests.adversary.lies.base import Liar, lie, on_each_exchange

Tensors: TypeAlias = list[torch.Tensor]
# What a liar sends in place of what it has (the last item), and had in the rounds before.
Change: TypeAlias = Callable[[Sequence[Tensors], random.Random], Tensors]

BEYOND, WITHIN = 1e8, 900.0  # times an honest gradient: far beyond the gate of a mean, and just within
BEHIND = 3  # rounds, of whoever is slow

BOUNDED = "its share of an average, bounded by the aggregator"


def lie_about_tensors(liar: Liar, change: Change) -> None:
    """From the next round on; the liar takes up the averages like everyone."""
    assert liar.averager is not None
    core, had = liar.averager, list[Tensors]()
    make = core._make_round

    def make_with_lies(control: Any, group: Any, weight: float, tensors: Tensors, *how: Any) -> Any:
        had.append([tensor.detach().clone() for tensor in tensors])
        liar.told.append("a gradient")
        return make(control, group, weight, change(had, liar.random), *how)

    core._make_round = make_with_lies  # type: ignore[method-assign]


def times(factor: float) -> Change:
    return lambda had, _: [tensor * factor for tensor in had[-1]]


def noise(had: Sequence[Tensors], source: random.Random) -> Tensors:
    """Ten times as large as the gradient."""
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    sizes = [10 * tensor.square().mean().sqrt() for tensor in had[-1]]
    drawn = [torch.randn(tensor.shape, generator=generator) for tensor in had[-1]]
    return [(size * each).to(tensor) for size, each, tensor in zip(sizes, drawn, had[-1], strict=True)]


def aside(had: Sequence[Tensors], _: random.Random) -> Tensors:
    """Two of its own standard deviations away, in all elements alike (after Baruch et al., arXiv 1902.06156)."""
    return [tensor - 2 * tensor.std(correction=0) for tensor in had[-1]]


def spike(had: Sequence[Tensors], _: random.Random) -> Tensors:
    """Honest but for one number."""
    changed = [tensor.clone() for tensor in had[-1]]
    changed[0].view(-1)[0] = WITHIN * max(float(tensor.abs().max()) for tensor in changed)
    return changed


def slowly(had: Sequence[Tensors], source: random.Random) -> Tensors:
    """What it had a few rounds before."""
    return had[max(0, len(had) - 1 - BEHIND)]


CHANGES: dict[str, tuple[Change, str]] = {
    "sign flip": (times(-1.0), BOUNDED),
    "scaled": (times(-WITHIN), f"{WITHIN:g} times its share with a mean; its share with a robust aggregator"),
    "scaled beyond the gate": (times(-BEYOND), "nothing with a mean of four or more; its share otherwise"),
    "random": (noise, BOUNDED),
    "a little is enough": (aside, BOUNDED),
    # A little of the opposite, which is closer to the others than noise is (Xie et al., arXiv 1903.03936).
    "inner product": (times(-0.6), BOUNDED),
    "lazy": (lambda had, _: had[0], BOUNDED),
    "slow": (slowly, BOUNDED),
    "free rider": (times(0.0), "it slows the run by its share of the weights"),
    "one number": (spike, f"one element, {WITHIN:g} times its share with a mean"),
}


def _enter(name: str, change: Change, at_most: str) -> None:
    @lie(name, "gradients", at_most=at_most)
    def tell(liar: Liar) -> None:
        lie_about_tensors(liar, change)


for _name, (_change, _at_most) in CHANGES.items():
    _enter(_name, _change, _at_most)


class _Unlike(Inputs):
    """The gradient for one reducer, its opposite for the next."""

    def __init__(self, honest: Inputs) -> None:
        self.__dict__.update(vars(honest))

    def part(self, part: Part) -> torch.Tensor:
        values = super().part(part)
        return -values if part.reducer % 2 else values


@lie("equivocation about gradients", "gradients", at_most=BOUNDED)
def tell_each_reducer_something_else(liar: Liar) -> None:
    def alter(exchange: Any) -> None:
        if exchange._means.mine is not None:
            unlike = exchange._means.mine = _Unlike(exchange._means.mine)
            for side in filter(None, (exchange._reducer, exchange.audits)):
                side._inputs = unlike
            liar.told.append("unlike gradients")

    on_each_exchange(liar, alter)
