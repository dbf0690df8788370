"""How far a peer's own steps have led from the run's anchor: what a round of outer steps averages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from swarmcli.compression.base import all_finite as is_finite
from swarmcli.optim.gradients.accumulator import Weighed, all_finite, lent, sum_type
from swarmcli.optim.state.anchor import Anchored


class Differences:
    """Makes inner steps, and the difference to which all steps since the anchor add up.

        add, add ──▶ an inner step, once `inner_batch_size` samples are there ──▶ the model
        freeze   ──▶ means: (anchor − model) / inner steps ──▶ the round ─┬─ committed: settle
                                                                           ├─ dead: restore
                                                                           └─ undecided: set_aside

    A difference grows with its steps, so the weighted mean of whole differences would favor quick peers twice. Each is
    divided by its steps, and their weighted mean is multiplied by `steps_of` the round, as in FedNova (arXiv
    2007.07481): every inner step counts by its weight, and the anchor goes as far as the peers went.

    Without an `inner_batch_size` each batch makes a step, and differences are averaged as they are.

    If a round has counted nothing of a difference, the next difference has it. One call at a time.
    """

    waits = False

    def __init__(self, place: Anchored, inner: torch.optim.Optimizer, inner_batch_size: int | None) -> None:
        pairs = zip(place.model_parameters, place.inner.state_parameters, strict=True)
        trained = [pair for pair in pairs if pair[0].requires_grad]
        self.parameters, self._stepped = tuple(p for p, _ in trained), tuple(p for _, p in trained)
        self.means = tuple(torch.zeros(p.shape, dtype=sum_type(p.dtype)) for p in self.parameters)
        self._moved = Weighed()  # of the inner steps since the anchor, without what is handed in
        self.handed_in = Weighed()
        self._marked = False  # what is handed in is a difference; otherwise only its samples
        self._place, self._inner, self._inner_batch = place, inner, inner_batch_size
        self._sums: list[torch.Tensor] | None = None  # weighted sums of gradients of a part of an inner step
        self._summed = Weighed()  # what is in the sums

    @property
    def samples(self) -> int:
        return self._moved.samples

    @torch.no_grad()
    def add(self, batch_size: int, scale: float | None = None, weight: float | None = None) -> bool:
        """Takes in the parameters' present gradients, means over `batch_size` samples, and makes the inner step when it
        has enough samples, unless their weight is 0. Returns False, and drops the batch, if a gradient is not finite.

        `weight`: of the batch; None: its samples. `scale`: the losses were multiplied by it. Raises ValueError, and
        changes nothing, for a batch that is larger than an inner step.
        """
        batch = Weighed.of(batch_size, weight)
        inner_batch = self._inner_batch or batch_size
        if batch_size > inner_batch:
            raise ValueError(
                f"batch_size={batch_size!r}: an inner step has {inner_batch} samples (inner_batch_size), and a "
                "batch cannot have more; compute it in parts"
            )
        self._place.wake()
        gradients = [parameter.grad for parameter in self.parameters]
        if not batch.weight:
            gradients = [None] * len(gradients)
        if not all_finite(each for each in gradients if each is not None):
            return False
        factor = 1.0 / (scale or 1.0)
        if not self._summed.samples and batch_size == inner_batch:
            self._step(gradients if factor == 1.0 else [None if g is None else g * factor for g in gradients])
            self._moved += batch
            return True
        if self._sums is None:
            self._sums = [torch.zeros_like(p, dtype=sum_type(p.dtype)) for p in self.parameters]
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total.add_(gradient, alpha=batch.weight * factor)
        self._summed += batch
        if self._summed.samples >= inner_batch:
            self._step([total / self._summed.weight if self._summed.weight else None for total in self._sums])
            self._moved += self._summed
            self._drop_sums()
        return True

    def _step(self, gradients: Iterable[torch.Tensor | None]) -> None:
        pairs = [(p, g) for p, g in zip(self._stepped, gradients, strict=True) if g is not None]
        if not pairs:
            return
        with lent([p for p, _ in pairs], [g for _, g in pairs]):
            self._inner.step()
        self._place.inner.publish()

    @torch.no_grad()
    def freeze(self) -> Weighed:
        """Writes the difference per inner step to `means`, and returns what is in it. If it is not finite, everything
        is dropped, and the model is the anchor again."""
        self._place.mark(self.means)
        if not all(is_finite(mean) for mean in self.means):
            self.reset()
        steps = self.samples / self._inner_batch if self._inner_batch else float(self.samples > 0)
        for mean in self.means:
            mean.div_(steps) if steps else mean.zero_()
        self._marked = True
        return self._hand_in()

    def count(self) -> Weighed:
        """Hands in only the samples: what was learned from them is in a later difference."""
        self._marked = False
        return self._hand_in()

    def _hand_in(self) -> Weighed:
        self.handed_in, self._moved = self._moved.in_round, Weighed()
        return self.handed_in

    def restore(self) -> None:
        """The round is dead: what was frozen counts again."""
        self._moved, self.handed_in = self._moved + self.handed_in, Weighed()

    def set_aside(self) -> None:
        """A round may have counted what was frozen: no other difference gets it, see `Anchored.set_aside`."""
        if self.handed_in.samples and self._marked:
            self._place.set_aside()
        self.handed_in = Weighed()

    @torch.no_grad()
    def settle(self, counted: bool) -> None:
        """A round has committed, and the anchor is about to step. `counted`: the round has some of what was frozen."""
        if not counted:
            self.restore()
        self._place.move(counted=counted)
        self.handed_in = Weighed()

    def reset(self) -> None:
        """Drops everything: the model is the anchor again."""
        self._place.give_up()
        self._drop_sums()
        self._moved = self.handed_in = Weighed()

    def _drop_sums(self) -> None:
        self._sums, self._summed = None, Weighed()


def steps_of(pairs: Sequence[tuple[float, float]], inner_batch_size: int) -> float:
    """The weighted mean of the contributors' inner steps, by which the mean of differences per step is multiplied.
    `pairs`: weight and samples of each contributor; their order changes no bit of the result."""
    total = math.fsum(weight for weight, _ in pairs)
    return math.fsum(weight * samples for weight, samples in pairs) / total / inner_batch_size if total > 0 else 0.0
