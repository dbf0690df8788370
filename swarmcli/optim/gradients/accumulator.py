"""Adds up gradients of small batches to one of a large batch, and makes the swarm's mean from everyone's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from swarmcli.compression.base import all_finite as is_finite
from swarmcli.errors import OptimizerError

if TYPE_CHECKING:
    from swarmcli.averaging.round.program import RoundProgram
    from swarmcli.compression import CompressionBase


MOST_WEIGHT, LEAST_WEIGHT = 1e12, 1e-9  # of one batch; of what one peer brings to a round


@dataclass(frozen=True, slots=True)
class Weighed:
    """Gradients count by `samples` towards the epoch's target, and by `weight` in the average."""

    samples: int = 0
    weight: float = 0.0

    @classmethod
    def of(cls, batch_size: int, weight: float | None = None) -> Weighed:
        """Describes one batch. `weight`: None: the batch size. Raises ValueError unless the batch size is positive, and
        the weight 0 to MOST_WEIGHT."""
        if batch_size <= 0:
            raise ValueError(f"batch_size={batch_size!r}: expected a positive number of samples")
        weight = float(batch_size if weight is None else weight)
        if not 0 <= weight <= MOST_WEIGHT:
            raise ValueError(f"weight={weight!r}: expected 0 to {MOST_WEIGHT:g}, such as the tokens that count")
        return cls(batch_size, weight)

    @property
    def in_round(self) -> Weighed:
        """As reducers take it: samples with weight 0 are in the average with next to no weight."""
        return replace(self, weight=max(self.weight, LEAST_WEIGHT)) if self.samples else self

    def __add__(self, other: Weighed) -> Weighed:
        return Weighed(self.samples + other.samples, self.weight + other.weight)

    def __sub__(self, other: Weighed) -> Weighed:
        return Weighed(self.samples - other.samples, self.weight - other.weight)


class GradientAccumulator:
    """What a peer brings to the round that ends an epoch: weighted sums of gradients, and the host buffers through
    which their mean goes to the swarm.

        add, add, add ──▶ sums ── freeze ──▶ means ──▶ the round ─┬─ committed: settle
                           ▲                                      │
                           └──────────── restore ─────────────────┴─ dead, or undecided

    `accumulators[i]` and `means[i]` have the shape of `parameters[i]`. Both are float32 if a parameter has a shorter
    type, since sums over an epoch would lose what small gradients add. Sums lie beside their parameters or on `device`,
    means in host memory, where the network reads and writes them. `freeze` leaves the sums as they are; the next `add`
    makes them zero.

    With `reuse` the accumulators are the parameters' own `.grad`, in the parameters' type, and backward passes add to
    them: no second buffer. All batches of an epoch then have one weight, and nobody but this class may zero or replace
    the gradients.

    `restore` and `settle` may be called while another thread is in `add`; otherwise one call at a time.
    """

    waits = False  # whether `freeze` waits for other processes, so that it must not be called on an event loop

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        reuse: bool = False,
        device: torch.device | str | None = None,
        means: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """`device`: of the sums; None: their parameters'. `means`: the host buffers to use; None: new ones. Raises
        ValueError for buffers that do not fit, for no parameters, and for `reuse` with a device."""
        if not parameters:
            raise ValueError("parameters: expected at least one tensor with requires_grad")
        if reuse and device is not None:
            raise ValueError(f"accumulate_grads_on={device!r}: reused gradients stay where their parameters are")
        self.parameters = tuple(parameters)
        self.reuse = reuse
        self.accumulators = tuple(
            _own_gradient(p) if reuse else _zeros(p, p.device if device is None else torch.device(device))
            for p in self.parameters
        )
        self.means = tuple(_zeros(p, torch.device("cpu")) for p in self.parameters) if means is None else tuple(means)
        _check_means(self.means, self.parameters)
        self.times = 0  # calls of `add` since the sums were last empty
        self.handed_in = Weighed()  # what is frozen: a round may be using its mean
        self._summed = Weighed()  # what is in the sums
        self._returned = Weighed()  # what was restored: it lies in `means`, and belongs to the sums again
        self._used = False  # the sums still hold what was frozen: exact if it is restored, otherwise to be zeroed
        self._scale = 1.0  # factor of reused gradients; separate sums hold unscaled ones
        self._unit = 1.0  # weight of what backward passes add: of a batch if gradients are reused, otherwise 1

    @property
    def samples(self) -> int:
        """Samples that are accumulated for the next round, without those that are frozen."""
        return self._summed.samples + self._returned.samples

    @property
    def weight(self) -> float:
        """The weight of `samples` in the average."""
        return self._summed.weight + self._returned.weight

    @torch.no_grad()
    def add(self, batch_size: int, scale: float | None = None, weight: float | None = None) -> bool:
        """Takes in the parameters' present gradients, means over `batch_size` samples. Returns False, and drops the
        batch, if a gradient is not finite.

        `weight`: of the batch in the average (None: its samples); with 0 only its samples count. `scale`: the losses
        were multiplied by it; then, if a gradient is not finite, everything that is accumulated, and not frozen, is
        dropped with the batch, since all of it had one scale. Reused gradients without a scale are checked only when
        they are frozen: they hold the batch already.

        A parameter without a gradient adds nothing. Raises ValueError, and adds nothing, if the batch size is not
        positive, the weight is impossible, or a gradient is sparse or of another shape than its buffer. Reused
        gradients hold the batch already, which cannot be undone: if it has another weight or scale than the batches
        before it, or a gradient is another tensor, this drops all that the epoch has accumulated and raises
        OptimizerError.
        """
        batch = Weighed.of(batch_size, weight)
        if self.reuse:
            self._check_reused(batch, scale or 1.0)
        else:
            self._check_gradients()
        looked_at = batch.weight > 0 and (scale is not None or not self.reuse)
        if looked_at and not all_finite(p.grad for p in self.parameters if p.grad is not None):
            if scale is not None:
                self._drop_sums()
            return False
        if not self.reuse:
            self._make_ready()
            for parameter, total in zip(self.parameters, self.accumulators, strict=True):
                if parameter.grad is not None and batch.weight:
                    total.add_(parameter.grad.to(total.device), alpha=batch.weight / (scale or 1.0))
        if self._returned.samples:
            self._merge_returned()
        self._summed += batch
        self.times += 1
        return True

    @torch.no_grad()
    def load_means(self) -> bool:
        """Writes the mean over this peer's samples to `means`; zeros if it has none. Returns whether all of it is
        finite.
        """
        if self._returned.samples:
            self._merge_returned()
        for total, mean in zip(self.accumulators, self.means, strict=True):
            if self._summed.weight:
                mean.copy_(total).div_(self._summed.weight / self._unit * self._scale)
            else:
                mean.zero_()
        return all(is_finite(mean) for mean in self.means)

    def freeze(self) -> Weighed:
        """Writes the mean to `means` and empties the sums; returns what is in the mean.

        If it is not finite, all gradients are dropped, the means are zeros, and nothing is in them. What was frozen
        earlier, and neither settled nor restored, is lost.
        """
        if not self.load_means():
            self.reset()
            self.load_means()
        self.handed_in, self._summed, self.times = self._summed.in_round, Weighed(), 0
        self._empty(keep_until_needed=True)
        return self.handed_in

    def settle(self, counted: bool = True) -> None:
        """The parameters step: what was frozen is used up, even if no round has `counted` it, since it is of the old
        parameters. Without effect if nothing was frozen."""
        self.handed_in = Weighed()

    def restore(self) -> None:
        """No round has used what was frozen: it counts again, once. Until the next `add` or `freeze`, which takes them
        back into the sums, `means` must stay as `freeze` wrote them. Without effect if nothing was frozen."""
        self._returned, self.handed_in = self._returned + self.handed_in, Weighed()

    def reset(self) -> None:
        """Drops everything: sums, and what was frozen."""
        self.handed_in = Weighed()
        self._drop_sums()

    def _drop_sums(self) -> None:
        self._returned, self._summed, self.times = Weighed(), Weighed(), 0
        self._empty(keep_until_needed=False)

    def _check_gradients(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        for index, (gradient, total) in enumerate(zip(gradients, self.accumulators, strict=True)):
            if gradient is not None and (gradient.is_sparse or gradient.shape != total.shape):
                raise ValueError(
                    f"gradient {index} has shape {tuple(gradient.shape)} and layout {gradient.layout}: "
                    f"expected a dense one of shape {tuple(total.shape)}, as at the start of training"
                )

    def _check_reused(self, batch: Weighed, scale: float) -> None:
        pairs = zip(self.parameters, self.accumulators, strict=True)
        replaced = [index for index, (parameter, total) in enumerate(pairs) if parameter.grad is not total]
        if not self._summed.samples:
            self._unit, self._scale = batch.weight, scale
        if not replaced and (batch.weight, scale) == (self._unit, self._scale) and batch.weight:
            return
        for parameter, total in zip(self.parameters, self.accumulators, strict=True):
            parameter.grad = total
        self.reset()
        if replaced:
            raise OptimizerError(
                f"the gradient of parameter {replaced[0]} was replaced, by zero_grad for example: with reused gradient "
                f"buffers it is the accumulator; the gradients of this epoch are dropped"
            )
        given, first = f"weight {batch.weight:g}, scale {scale:g}", f"{self._unit:g} and {self._scale:g}"
        raise OptimizerError(
            f"{given}: with reused gradient buffers all batches of an epoch have one weight above 0 (the batch size, "
            f"unless one is given) and one scale, which were {first}; the gradients of this epoch are dropped"
        )

    @torch.no_grad()
    def _merge_returned(self) -> None:
        """Takes what was restored back into the sums: from `means`, unless the sums still hold it."""
        if self._used:
            self._used = False
        else:
            for total, mean in zip(self.accumulators, self.means, strict=True):
                total.add_(mean.to(total), alpha=self._returned.weight / self._unit * self._scale)
        returned, self._returned = self._returned, Weighed()
        self._summed += returned

    def _make_ready(self) -> None:
        """Makes the sums zero, or what counts, before gradients are added to them."""
        if self._returned.samples:
            self._merge_returned()
        if self._used:
            self._zero()

    def _empty(self, keep_until_needed: bool) -> None:
        # Reused gradients are zeroed at once: the next backward pass adds to them.
        self._used = True
        if self.reuse or not keep_until_needed:
            self._zero()

    @torch.no_grad()
    def _zero(self) -> None:
        for total in self.accumulators:
            total.zero_()
        self._used = False


class GradientMethod:
    """How gradients are averaged, at one peer. It works on the means of one GradientAccumulator, for one AveragerCore.

    Around a round: `load` when the means are frozen; the round, or `alone`; `finish` when it has committed. If a round
    fails, nothing that outlives rounds has changed, and `load` may follow again.

    This one averages the means as they are, in place, by one weighted all-reduce: nothing outlives a round. The tensors
    `beside` are averaged in the same round, as they are.
    """

    def __init__(self, means: Sequence[torch.Tensor], beside: Sequence[torch.Tensor] = ()) -> None:
        # Dense mean gradients in host memory, in the shapes of the parameters; valid after `finish`.
        self.averaged = means
        # The averager is made with these, and keeps them of committed rounds for replays.
        self.tensors: Sequence[torch.Tensor] = [*means, *beside]
        self.beside = tuple(beside)
        self.samples = 0.0  # the weight of what is loaded; 0: nothing is loaded, or it has next to no weight

    @property
    def program(self) -> RoundProgram | None:
        """The phases of a round; None: one all-reduce over `tensors`."""
        return None

    @property
    def compression(self) -> CompressionBase | None:
        """The codec of `tensors`; None: that of the averager's options."""
        return None

    @property
    def shared(self) -> Mapping[str, torch.Tensor]:
        """Name → tensor, of what all peers hold alike beside their parameters, and a newcomer needs."""
        return {}

    @property
    def own(self) -> Mapping[str, torch.Tensor]:
        """Name → tensor, of what only this peer has, and what only goes into its checkpoints."""
        return {}

    def load(self, weight: float) -> None:
        """The next round averages the accumulator's present means, with this weight."""
        self.samples = weight if weight > LEAST_WEIGHT else 0.0  # no method can divide by less

    def alone(self) -> None:
        """Makes `tensors` what a round with nobody else would give."""

    def finish(self, weight: float, counted: bool) -> None:
        """`tensors` hold the outcome of a round of this total weight: writes `averaged`, and changes what outlives
        rounds.

        `counted`: what was loaded here is in it; False if this peer was left out, or replays a round of others. The
        means that were loaded are used up.
        """

    def set_aside(self) -> None:
        """A round may have counted what was loaded. `load` may follow; later `forget_aside` says whether the round
        has."""

    def forget_aside(self, *, counted: bool) -> None:
        """A round has, or has not, `counted` what was set aside. Without effect if nothing was."""

    @torch.no_grad()
    def reset_own(self) -> str:
        """Drops `own`, since the parameters from which it came have been replaced. Returns what is lost, in words; "":
        nothing."""
        norm = math.hypot(*(float(each.norm()) for each in self.own.values()))
        for each in self.own.values():
            each.zero_()
        return f"error feedback of this peer is lost: a norm of {norm:.3g} in sums over samples" if norm else ""


@contextmanager
def lent(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside the block the parameters have these gradients, in their own types and on their own devices; afterwards
    they have the user's again."""
    users = [parameter.grad for parameter in parameters]
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(dtype=parameter.dtype, device=parameter.device)
        yield
    finally:
        for parameter, own in zip(parameters, users, strict=True):
            parameter.grad = own


def all_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Whether all values are finite numbers. It reads each tensor once, copies none, and waits once for each device."""
    finite: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if values.device.type == "cpu":
            if not is_finite(values):  # on a processor the norm below would take 25 times as long
                return False
        elif values.numel():
            largest = torch.linalg.vector_norm(values.detach(), ord=float("inf"))
            finite.setdefault(largest.device, []).append(largest.isfinite())
    return all(bool(torch.stack(answers).all()) for answers in finite.values())


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of this type are added up and averaged."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _check_means(means: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
    if len(means) != len(parameters):
        raise ValueError(
            f"averaged_grads: expected {len(parameters)} tensors, one for each parameter, got {len(means)}"
        )
    for index, (mean, parameter) in enumerate(zip(means, parameters, strict=True)):
        wanted = sum_type(parameter.dtype)
        fits = mean.shape == parameter.shape and mean.dtype == wanted and mean.device.type == "cpu"
        if not (fits and mean.is_contiguous()):
            raise ValueError(
                f"averaged_grads[{index}] has shape {tuple(mean.shape)}, {mean.dtype}, {mean.device}: expected a "
                f"contiguous host tensor of shape {tuple(parameter.shape)}, {wanted}"
            )


def _own_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Sets the parameter's `.grad` to zeros, and returns it."""
    parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    return parameter.grad


def _zeros(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros(parameter.shape, dtype=sum_type(parameter.dtype), device=device)
