"""The model's buffers, such as batch norm's running means, averaged in the rounds of the gradients.

    model    live ── what it has moved since the last average ──▶ the round, beside the gradients
    state    own  ◀── += the average of that ─────────────────────┘      equal at all peers of a lineage
    model    live ◀── publish: moved as far as `own` was

Differences go into the round, so that a lossy codec loses little, and what never changes stays as it is, bit for bit.
They have the gradients' weights: so a monitor, which runs no forward pass, gets the trainers' buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarmcli.compression.base import all_finite
from swarmcli.optim.gradients.accumulator import sum_type


def is_averaged(tensor: torch.Tensor) -> bool:
    """Whether such tensors have a mean: numbers do, masks do not. The mean of whole numbers is rounded."""
    return tensor.dtype != torch.bool and not tensor.is_complex() and not tensor.is_quantized


def room_for(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Zeros in host memory, in the shapes and types in which buffers are averaged."""
    return [
        torch.zeros(each.shape, dtype=sum_type(each.dtype) if each.is_floating_point() else torch.float64)
        for each in buffers
        if is_averaged(each)
    ]


class Buffers:
    """The buffers of one model. One call at a time, and all but `finish` only while the model does not compute.

    own    the state's buffers, in host memory; where none is averaged, the model's own tensor
    means  what the round averages
    """

    def __init__(self, live: Sequence[torch.Tensor]) -> None:
        self.own = tuple(each.detach().to("cpu", copy=True) if is_averaged(each) else each for each in live)
        self.means = room_for(live)
        pairs = [(each, own) for each, own in zip(live, self.own, strict=True) if is_averaged(each)]
        self._live, self._own = [each.detach() for each, _ in pairs], [own for _, own in pairs]
        self._bases = [own.clone() for own in self._own]  # values of `own` from which the model's buffers have moved on
        self._loaded: list[torch.Tensor] | None = None  # the model's buffers as they went into the round

    @torch.no_grad()
    def load(self) -> None:
        """Puts into the next round how far the model's buffers have moved."""
        self.publish()
        self._loaded = [each.to("cpu", copy=True) for each in self._live]
        for now, own, mean in zip(self._loaded, self._own, self.means, strict=True):
            mean.copy_(now).sub_(own)
            if not all_finite(mean):
                mean.zero_()

    @torch.no_grad()
    def finish(self, counted: bool = True) -> None:
        """Moves the state's buffers by the average of a round, which `means` hold. Not `counted`: this peer replays the
        round, so the model's buffers will be the state's, however far they have moved."""
        loaded = self._loaded if counted else None
        self._loaded = None
        for own, mean in zip(self._own, self.means, strict=True):
            own.add_(mean if own.is_floating_point() else mean.round().to(own.dtype))
        self._bases = loaded or [each.to("cpu", copy=True) for each in self._live]

    @torch.no_grad()
    def publish(self) -> None:
        """Moves the model's buffers as far as the state's have moved."""
        for live, own, base in zip(self._live, self._own, self._bases, strict=True):
            if not torch.equal(own, base):
                # Running variances, for example, must not become negative, as they could by the sum alone.
                positive = own.is_floating_point() and bool((base > 0).all() and (live > 0).all())
                live.copy_(moved(live, own, base, squares=positive))
                base.copy_(own)

    @torch.no_grad()
    def replace(self) -> None:
        """Sets the model's buffers to those of the state, which has been replaced."""
        for live, own, base in zip(self._live, self._own, self._bases, strict=True):
            live.copy_(own)
            base.copy_(own)
        self._loaded = None

    @torch.no_grad()
    def adopt(self) -> None:
        """Sets the state's buffers to those of the model, which have been restored."""
        for live, own, base in zip(self._live, self._own, self._bases, strict=True):
            own.copy_(live)
            base.copy_(own)
        self._loaded = None


def moved(live: torch.Tensor, average: torch.Tensor, before: torch.Tensor, *, squares: bool) -> torch.Tensor:
    """The delta rule: `live` + `average` − `before`, so that what a peer has learned during the round is kept.

    All tensors have one shape; `average`, `before` and the result are in host memory. Where `live` is still as it was
    copied, or `before` was not finite, the result is the average itself, bit for bit: so peers end with equal states.
    """
    present = live.cpu()
    exact = torch.float32 if present.dtype.itemsize < 4 else present.dtype
    change = average.to(exact) - before.to(exact)
    result = (present.to(exact) + change).to(average.dtype)
    result = torch.where((present == before) | ~before.isfinite(), average, result)
    # For means of squares the sum alone would be wrong: if state and average have both fallen below the copy, it is
    # near zero or negative, and Adam divides by its root.
    return torch.fmax(result, torch.fmin(present, average)) if squares else result
