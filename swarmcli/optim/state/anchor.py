"""The anchor, which the run steps, and the model, which each peer's own steps lead away from it.

    anchor   A0 ───────────────── the outer optimizer steps with the round's average ──▶ A1       equal at all peers
    model    A0 ── own steps ──▶ P1 ── own steps ──▶ P2 ── publish ──▶ A1 + (P2 − P1)
                                 │ handed in: A0 − P1

`origin` is the point on the model's way that the new anchor replaces. It is P1 if the round counted what was handed in.
It is A0 if the round did not: then all that was learned since A0 counts for the next round. If nobody knows whether it
did, `origin` is P1 and the next difference begins there: what a round may have counted is in no other one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from swarmcli.optim.state.replica import Offloaded, ParameterPlacement


class Anchored(Offloaded):
    """The parameters that inner steps move, and their anchor in host memory, which the outer optimizer steps.

    Call all methods but `move` only while the model does not compute. `move` comes before the anchor steps.
    """

    def __init__(self, place: ParameterPlacement, outer: Callable[[Any], torch.optim.Optimizer]) -> None:
        """`place`: of the inner optimizer; what that steps is *the model* below. `outer` makes the outer optimizer of
        the anchor's tensors. For errors see Offloaded."""
        super().__init__(place.state_parameters, outer)
        self.inner, self.model_parameters = place, place.model_parameters
        self.anchor = [anchor.detach() for _, anchor in self._pairs]
        self._model = [parameter.detach() for parameter, _ in self._pairs]
        self._origin = [anchor.clone() for anchor in self.anchor]
        self._base: list[torch.Tensor] | None = None  # where the next difference begins; None: at the anchor
        self.moved = False  # the anchor has moved, and the model has not followed yet: `publish` moves it
        self._resting: list[torch.Tensor] | None = None  # the model's own parameters, while it holds the anchor's

    @torch.no_grad()
    def mark(self, difference: Sequence[torch.Tensor]) -> None:
        """Writes to `difference` how far the model has come, as a descent, and remembers where it is now."""
        self.publish()
        begins = self._base or self.anchor
        for model, begin, origin, target in zip(self._model, begins, self._origin, difference, strict=True):
            origin.copy_(model)
            target.copy_(begin).sub_(origin)

    def set_aside(self) -> None:
        """A round may have counted what was marked: the next difference begins after it."""
        self._base = [origin.clone() for origin in self._origin]

    @torch.no_grad()
    def move(self, *, counted: bool) -> None:
        """The anchor is about to step. `counted`: the round has counted what was marked."""
        base, self._base = self._base, None
        if not (counted or self.moved):
            for origin, begin in zip(self._origin, base or self.anchor, strict=True):
                origin.copy_(begin)
        self.moved = True

    @torch.no_grad()
    def arrive(self) -> None:
        """Puts the anchor where the model was marked, without rounding: so a lone peer trains as without a swarm."""
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
        """Moves the model to the present anchor, plus what it has learned since `origin`."""
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
        """Makes the model the anchor, to be saved or evaluated, until `wake` gives it back what it has learned."""
        self.check()
        self.wake()
        self._resting = [model.to("cpu", copy=True) for model in self._model]
        for model, anchor in zip(self._model, self.anchor, strict=True):
            model.copy_(anchor)
        self.inner.publish()

    @torch.no_grad()
    def give_up(self) -> None:
        """Makes the model the anchor for good: drops what it has learned."""
        self._begin()
        super().publish()
        self.inner.publish()

    def adopt(self) -> None:
        self._begin()
        self.inner.adopt()
        super().adopt()

    def _begin(self) -> None:
        self.moved, self._base, self._resting = False, None, None
