"""Parameters of which the run steps an anchor, while each peer's own steps lead its model away from it.

    anchor   A0 ───────────────── the outer optimizer steps with the round's average ──▶ A1       equal at all peers
    model    A0 ── own steps ──▶ P1 ── own steps ──▶ P2 ── publish ──▶ A1 + (P2 − P1)
                                 │ handed in: A0 − P1

`origin` is the point of the model's way in whose place the anchor comes: P1 where the round counted what was handed in,
and A0 where it did not, since then all that was learned since counts for the next one. So no step is lost, and none is
counted twice.
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
        self.moved = False  # the anchor, or what the model computes with: `publish` brings them together

    @torch.no_grad()
    def mark(self, difference: Sequence[torch.Tensor]) -> None:
        """Writes how far the model is from the anchor, which is a descent, and remembers where it is now."""
        self.publish()
        for model, anchor, origin, target in zip(self._model, self.anchor, self._origin, difference, strict=True):
            origin.copy_(model)
            target.copy_(anchor).sub_(origin)

    def marked(self) -> list[torch.Tensor]:
        """The difference that `mark` wrote, of an anchor that has not stepped since."""
        return [anchor - origin for anchor, origin in zip(self.anchor, self._origin, strict=True)]

    @torch.no_grad()
    def move(self, *, counted: bool, given_up: Sequence[torch.Tensor] | None = None) -> None:
        """The anchor is about to step. `counted`: with what was marked. Of what was not counted, `given_up` is dropped:
        a difference."""
        if not (counted or self.moved):
            for number, (anchor, origin) in enumerate(zip(self.anchor, self._origin, strict=True)):
                origin.copy_(anchor)
                if given_up is not None:
                    origin.sub_(given_up[number])
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
        self.moved = False
        super().publish()

    def adopt(self) -> None:
        self.moved = False
        super().adopt()
