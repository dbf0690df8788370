"""Muon for the matrices within a model and AdamW for all else, as one optimizer.

Muon steps along the orthogonalised momentum of a matrix (Keller Jordan et al., 2024). Embeddings and the matrix of the
last layer map from or to tokens, where this has no meaning, and neither has it for vectors. torch's Muon takes matrices
alone; a step of it is scaled to the size of AdamW's (Moonlight, arXiv 2502.16982, section 2.2), so that both have one
learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

BY_MUON = "by_muon"  # key of a parameter group


class MuonWithAdamW(torch.optim.Optimizer):
    """One state and one list of groups, which two optimizers of torch step. A group's `by_muon` says which of them."""

    def __init__(self, groups: Any, lr: float, **settings: Any) -> None:
        """`settings`: options of both, by torch's names."""
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, BY_MUON: False, **settings})
        self._join()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = closure() if closure is not None else None
        for part in self._parts:
            part.step()
        return loss

    def _join(self) -> None:
        """Has both optimizers step these groups with this state. Loading a state makes new groups and a new state, so
        it is called again then."""
        muon = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
        self._parts: list[torch.optim.Optimizer] = []
        for kind, by_muon in ((muon, True), (torch.optim.AdamW, False)):
            if own := [group for group in self.param_groups if group[BY_MUON] == by_muon]:
                self._parts.append(kind(own))
                self._parts[-1].state = self.state
