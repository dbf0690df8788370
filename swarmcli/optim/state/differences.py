"""How far a peer's own steps have led from the run's anchor: what a round of outer steps averages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from swarmcli.compression.base import all_finite as is_finite
from swarmcli.optim.gradients.accumulator import all_finite, lent, sum_type
from swarmcli.optim.state.anchor import Anchored

Lost = Callable[[int], None]


class Differences:
    """Makes inner steps, and the difference of all since the anchor.

        add, add ──▶ an inner step, once `inner_batch_size` samples are there ──▶ the model
        freeze   ──▶ means: (anchor − model) / inner steps ──▶ the round ─┬─ committed: settle
                                                                           └─ given up: restore

    A difference grows with its steps, so the mean over samples of whole differences would favour quick peers twice.
    Each is divided by its steps, weighed by its samples, and their mean multiplied by `steps_of` the round, as in
    FedNova (arXiv 2007.07481): every inner step counts the same, and the anchor goes as far as peers went.

    A difference that a round did not count is in the next one, once; then it is dropped, and `lost` hears how many
    samples that were. Calls exclude each other.
    """

    waits = False

    def __init__(
        self, place: Anchored, inner: torch.optim.Optimizer, inner_batch_size: int, lost: Lost = lambda samples: None
    ) -> None:
        self.parameters = tuple(p for p in place.model_parameters if p.requires_grad)
        self.means = tuple(torch.zeros(p.shape, dtype=sum_type(p.dtype)) for p in self.parameters)
        self.samples = 0  # in inner steps since the anchor; those handed in are not among them
        self.handed_in = 0
        self._place, self._inner, self._inner_batch, self._lost = place, inner, inner_batch_size, lost
        self._sums: list[torch.Tensor] | None = None  # of gradients over the samples of an inner step
        self._summed = 0
        self._marked = 0  # samples in what was last frozen, whatever became of it
        self._late: list[torch.Tensor] | None = None  # a difference that a round has not counted …
        self._late_samples = 0  # … and its samples, which are among all others

    @torch.no_grad()
    def add(self, batch_size: int, scale: float | None = None) -> bool:
        """Takes in the parameters' present gradients, means over `batch_size` samples, of losses that were multiplied
        by `scale`; makes the inner step when it has enough. False: one is not finite, and the batch is dropped.

        Raises ValueError, and changes nothing, for a batch that is no part of an inner step.
        """
        if not 0 < batch_size <= self._inner_batch:
            raise ValueError(
                f"batch_size={batch_size!r}: an inner step has {self._inner_batch} samples (inner_batch_size), and a "
                "batch cannot have more; compute it in parts"
            )
        self._place.publish()
        gradients = [parameter.grad for parameter in self.parameters]
        if not all_finite(each for each in gradients if each is not None):
            return False
        factor = 1.0 / (scale or 1.0)
        if not self._summed and batch_size == self._inner_batch:
            self._step(gradients if factor == 1.0 else [None if g is None else g * factor for g in gradients])
            self.samples += batch_size
            return True
        if self._sums is None:
            self._sums = [torch.zeros_like(p, dtype=sum_type(p.dtype)) for p in self.parameters]
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total.add_(gradient, alpha=batch_size * factor)
        self._summed += batch_size
        if self._summed >= self._inner_batch:
            self._step([total / self._summed for total in self._sums])
            self.samples += self._summed
            self._drop_sums()
        return True

    def _step(self, gradients: Iterable[torch.Tensor | None]) -> None:
        pairs = [(p, g) for p, g in zip(self.parameters, gradients, strict=True) if g is not None]
        with lent([p for p, _ in pairs], [g for _, g in pairs]):
            self._inner.step()

    @torch.no_grad()
    def freeze(self) -> int:
        """Writes the difference for each inner step into `means`; returns the number of samples in it. One that is not
        finite is dropped, and the model is the anchor again: 0."""
        self._place.mark(self.means)
        if not all(is_finite(mean) for mean in self.means):
            self.reset()
        steps = self.samples / self._inner_batch
        for mean in self.means:
            mean.div_(steps) if steps else mean.zero_()
        self._marked = self.handed_in = self.samples
        self.samples = 0
        return self.handed_in

    def restore(self) -> None:
        """No round used what was frozen, as far as is known: it counts again."""
        self.samples, self.handed_in = self.samples + self.handed_in, 0

    def is_in(self, weight: float) -> bool:
        """Whether what was last frozen is in a round that counts so many samples of this peer: a limit may have made
        them fewer."""
        return weight > 0 and self._marked > 0

    @torch.no_grad()
    def settle(self, counted: bool) -> None:
        """A round has committed, and the anchor is about to step. `counted`: what was last frozen is in it."""
        self.restore()
        if counted:
            self.samples -= self._marked
            self._late, self._late_samples = None, 0
            self._place.move(counted=True)
        elif self._marked:
            whole, late, late_samples = self._place.marked(), self._late, self._late_samples
            self._place.move(counted=False, given_up=late)
            if late is not None:
                whole = [each - old for each, old in zip(whole, late, strict=True)]
                self.samples -= late_samples
                self._lost(late_samples)
            self._late, self._late_samples = whole, self._marked - late_samples
        else:
            self._place.move(counted=False)
        self._marked = 0

    def reset(self) -> None:
        """Drops everything: the model is the anchor."""
        self._place.give_up()
        self._drop_sums()
        self.samples = self.handed_in = self._marked = self._late_samples = 0
        self._late = None

    def _drop_sums(self) -> None:
        self._sums, self._summed = None, 0


def steps_of(weights: Iterable[float], inner_batch_size: int) -> float:
    """Inner steps by which the mean of differences for each step is multiplied: those of its contributors, weighed by
    their samples. The same to the bit in whatever order they are told."""
    weights = list(weights)
    total = math.fsum(weights)
    return math.fsum(weight * weight for weight in weights) / total / inner_batch_size if total > 0 else 0.0
