"""Muon for the matrices within a model and AdamW for all else, as one optimizer.

Muon steps along the orthogonalised momentum of a matrix (Keller Jordan et al., 2024). Embeddings and the matrix of the
last layer map from or to tokens, where this has no meaning, and neither has it for vectors. torch's Muon takes matrices
alone; a step of it is scaled to the size of AdamW's (Moonlight, arXiv 2502.16982, section 2.2), so that both have one
learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BY_MUON = "by_muon"  # of a parameter group


class MuonWithAdamW(torch.optim.Optimizer):
    """One state and one list of groups, which two optimizers of torch step. A group says which by `by_muon`."""

    def __init__(
        self,
        groups: Any,
        lr: float,
        *,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        weight_decay: float = 0.0,
    ) -> None:
        self._muon: torch.optim.Optimizer | None = None
        self._adamw: torch.optim.Optimizer | None = None
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps,
            "weight_decay": weight_decay, BY_MUON: False,
        }  # fmt: skip
        super().__init__(groups, defaults)
        matrices, others = self._divided()
        if matrices:
            self._muon = torch.optim.Muon(
                matrices, lr, weight_decay, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps,
                adjust_lr_fn="match_rms_adamw",
            )  # fmt: skip
        if others:
            self._adamw = torch.optim.AdamW(others, lr, betas, eps, weight_decay)
        self._join()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = closure() if closure is not None else None
        for part in (self._muon, self._adamw):
            if part is not None:
                part.step()
        return loss

    def _divided(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        matrices = [group for group in self.param_groups if group[BY_MUON]]
        return matrices, [group for group in self.param_groups if not group[BY_MUON]]

    def _join(self) -> None:
        """Both step these groups with this state: loading a state has made new ones."""
        for part, groups in zip((self._muon, self._adamw), self._divided(), strict=True):
            if part is not None:
                for group in groups:
                    for name, value in part.defaults.items():
                        group.setdefault(name, value)
                part.param_groups, part.state = groups, self.state
