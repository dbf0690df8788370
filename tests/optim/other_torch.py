"""Optimizers and schedulers with the keys of torch 2.6 in their states: what a peer with that version shows."""

from __future__ import annotations

from typing import Any

import torch

NEWER = {"decoupled_weight_decay"}  # keys of AdamW's groups that 2.6 does not know


class OldAdamW(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        groups = [{key: group[key] for key in group if key not in NEWER} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            assert not NEWER & set(group), "torch 2.6 would keep it and show it to others"
        groups = [{**group, "decoupled_weight_decay": True} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})


class OldLambdaLR(torch.optim.lr_scheduler.LambdaLR):
    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "_is_initial"} | {"verbose": False}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert "_is_initial" not in state_dict
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "verbose"})


class OldSequentialLR(torch.optim.lr_scheduler.SequentialLR):
    """Its parts note one step more than those of 2.13, and do not note whether they are new."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        parts = [
            {key: value for key, value in part.items() if key != "_is_initial"}
            | {"verbose": False, "_step_count": part["_step_count"] + 1}
            for part in state["_schedulers"]
        ]
        return {**state, "_schedulers": parts}


def old_adamw(params: Any) -> torch.optim.Optimizer:
    return OldAdamW(params, lr=0.01, foreach=False)


# As classes of torch are: what is private in them is torch's own.
for kind in (OldLambdaLR, OldSequentialLR):
    kind.__module__ = "torch.optim.lr_scheduler"
