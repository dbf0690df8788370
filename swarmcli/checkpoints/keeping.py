"""Which checkpoints stay on the disk."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keep:
    """What `checkpoint.keep`, `keep_every` and `keep_best` of a recipe say."""

    newest: int = 3
    every: int = 0  # epochs; 0: none stays for this
    best: int = 1


def kept(losses: Mapping[int, float | None], rules: Keep, latest: int | None = None) -> dict[int, tuple[str, ...]]:
    """Why each epoch stays, in words; one that may go is not in it.

    `losses`: of every checkpoint by its epoch; None: it was not evaluated. `latest` was written last, and stays: a run
    that was set back writes it beside those of later epochs.
    """
    why: dict[int, tuple[str, ...]] = {}
    for words, epochs in (
        ("newest", _newest(losses, rules.newest, latest)),
        (f"every {rules.every}th", _first_of_each(losses, rules.every)),
        ("best", best_epochs(losses, rules.best)),
    ):
        for epoch in epochs:
            why[epoch] = (*why.get(epoch, ()), words)
    return why


def best_epochs(losses: Mapping[int, float | None], count: int) -> list[int]:
    """Those with the lowest losses, the best first; of equal ones the later."""
    measured = [(loss, -epoch) for epoch, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return [-negative for _, negative in sorted(measured)[:count]]


def _newest(epochs: Collection[int], count: int, latest: int | None) -> list[int]:
    first = [latest] if latest in epochs and latest is not None else []
    return [*first, *sorted(set(epochs) - set(first), reverse=True)][:count]


def _first_of_each(epochs: Collection[int], every: int) -> list[int]:
    """Of each stretch of `every` epochs the first checkpoint, from the first multiple on: not every run writes one at a
    multiple, since a peer may be handed several epochs at once."""
    firsts: dict[int, int] = {}
    for epoch in sorted(epochs):
        if every and epoch >= every:
            firsts.setdefault(epoch // every, epoch)
    return list(firsts.values())
