"""Parameters of which the run steps an anchor, while each peer's own steps lead its model away from it.

    anchor   A0 ───────────────── the outer optimizer steps with the round's average ──▶ A1       equal at all peers
    model    A0 ── own steps ──▶ P1 ── own steps ──▶ P2 ── publish ──▶ A1 + (P2 − P1)
                                 │ handed in: A0 − P1

`origin` is the point of the model's way in whose place the anchor comes: P1 where the round counted what was handed in,
and A0 where it did not, since then all that was learned since counts for the next one. Where nobody knows, the next
difference begins at P1 all the same, and P1 is where the anchor comes: what a round may have counted is in no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from swarmcli.optim.state.replica import Offloaded, ParameterPlacement


class Anchored(Offloaded):
    """The parameters that inner steps move, and their anchor in host memory, which the outer optimizer steps.

    All but `move` are called while the model does not compute. `move` comes before the anchor steps.
    """

    def __init__(self, place: ParameterPlacement, outer: Callable[[Any], torch.optim.Optimizer]) -> None:
        """`place`: the inner optimizer's, in which *the model* below is what that steps; `outer` makes the outer
        optimizer of the anchor's tensors. For errors see Offloaded."""
        super().__init__(place.state_parameters, outer)
        self.inner, self.model_parameters = place, place.model_parameters
        self.anchor = [anchor.detach() for _, anchor in self._pairs]
        self._model = [parameter.detach() for parameter, _ in self._pairs]
        self._origin = [anchor.clone() for anchor in self.anchor]
        self._base: list[torch.Tensor] | None = None  # where the next difference begins; None: at the anchor
        self.moved = False  # the anchor, or what the model computes with: `publish` brings them together
        self._resting: list[torch.Tensor] | None = None  # the model's parameters, while it is the anchor

    @torch.no_grad()
    def mark(self, difference: Sequence[torch.Tensor]) -> None:
        """Writes how far the model has come, which is a descent, and remembers where it is now."""
        self.publish()
        begins = self._base or self.anchor
        for model, begin, origin, target in zip(self._model, begins, self._origin, difference, strict=True):
            origin.copy_(model)
            target.copy_(begin).sub_(origin)

    def set_aside(self) -> None:
        """No further difference has what was marked."""
        self._base = [origin.clone() for origin in self._origin]

    @torch.no_grad()
    def move(self, *, counted: bool) -> None:
        """The anchor is about to step. `counted`: with what was marked."""
        base, self._base = self._base, None
        if not (counted or self.moved):
            for origin, begin in zip(self._origin, base or self.anchor, strict=True):
                origin.copy_(begin)
        self.moved = True

    @torch.no_grad()
    def arrive(self) -> None:
        """The anchor has stepped to what was marked: without rounding, so a lone peer trains as without a swarm."""
        for anchor, origin in zip(self.anchor, self._origin, strict=True):
            anchor.copy_(origin)

    def shift(self) -> None:
        self.move(counted=False)

    @torch.no_grad()
    def wake(self) -> None:
        resting, self._resting = self._resting or [], None
        for model, kept in zip(self._model, resting, strict=False):
            model.copy_(kept)

    @torch.no_grad()
    def publish(self) -> None:
        """The model goes on from the anchor as it is now, and keeps what it learned since `origin`."""
        self.check()
        self.wake()
        if self.moved:
            for model, anchor, origin in zip(self._model, self.anchor, self._origin, strict=True):
                if not torch.equal(anchor, origin):
                    learned = model - origin.to(model.device)
                    model.copy_(anchor).add_(learned)
            self.moved = False
        self.inner.publish()

    @torch.no_grad()
    def rest(self) -> None:
        """The model is the anchor, to be saved or evaluated, until `wake` gives it back what it has learned."""
        self.check()
        self.wake()
        self._resting = [model.to("cpu", copy=True) for model in self._model]
        for model, anchor in zip(self._model, self.anchor, strict=True):
            model.copy_(anchor)
        self.inner.publish()

    @torch.no_grad()
    def give_up(self) -> None:
        """The model is the anchor again: what it learned is dropped."""
        self._begin()
        super().publish()
        self.inner.publish()

    def adopt(self) -> None:
        self._begin()
        self.inner.adopt()
        super().adopt()

    def _begin(self) -> None:
        self.moved, self._base, self._resting = False, None, None
