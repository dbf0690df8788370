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

from swarmcli.optim.state.replica import Offloaded


class Anchored(Offloaded):
    """The model's parameters, and their anchor in host memory, which the outer optimizer steps.

    All but `move` are called while the model does not compute. `move` comes before the anchor steps.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], outer: Callable[[Any], torch.optim.Optimizer]) -> None:
        """`outer` makes the outer optimizer of the anchor's tensors. For errors see Offloaded."""
        super().__init__(parameters, outer)
        self.anchor = [anchor.detach() for _, anchor in self._pairs]
        self._model = [parameter.detach() for parameter, _ in self._pairs]
        self._origin = [anchor.clone() for anchor in self.anchor]
        self._base: list[torch.Tensor] | None = None  # where the next difference begins; None: at the anchor
        self.moved = False  # the anchor, or what the model computes with: `publish` brings them together

    @torch.no_grad()
    def mark(self, difference: Sequence[torch.Tensor]) -> None:
        """Writes how far the model has come, which is a descent, and remembers where it is now."""
        self.publish()
        begins = self._base or self.anchor
        for model, begin, origin, target in zip(self._model, begins, self._origin, difference, strict=True):
            origin.copy_(model)
            target.copy_(begin).sub_(origin)

    def set_aside(self) -> None:
        """What was marked is in no further difference."""
        self._base = [origin.clone() for origin in self._origin]

    @torch.no_grad()
    def move(self, *, counted: bool) -> None:
        """The anchor is about to step. `counted`: with what was marked."""
        base, self._base = self._base, None
        for number, (anchor, origin) in enumerate(zip(self.anchor, self._origin, strict=True)):
            if not (counted or self.moved):
                origin.copy_(anchor if base is None else base[number])
            elif self.moved and base is not None:  # the model rests at the anchor, and `origin` has all that it learned
                origin.add_(base[number]).sub_(anchor)
        self.moved = True

    @torch.no_grad()
    def publish(self) -> None:
        """The model goes on from the anchor as it is now, and keeps what it learned since `origin`."""
        self.check()
        if self.moved:
            for model, anchor, origin in zip(self._model, self.anchor, self._origin, strict=True):
                learned = model - origin.to(model.device)
                model.copy_(anchor).add_(learned)
            self.moved = False

    @torch.no_grad()
    def rest(self) -> None:
        """The model is the anchor, to be saved or evaluated, until `publish` gives it back what it has learned."""
        self.publish()
        for model, anchor, origin in zip(self._model, self.anchor, self._origin, strict=True):
            origin.copy_(anchor).mul_(2).sub_(model.to(origin.device))
            model.copy_(anchor)
        self.moved = True

    @torch.no_grad()
    def give_up(self) -> None:
        """The model is the anchor again: what it learned is dropped."""
        self.moved, self._base = False, None
        super().publish()

    def adopt(self) -> None:
        self.moved, self._base = False, None
        super().adopt()
