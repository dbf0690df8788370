"""The settings of parameter groups (learning rate, betas, ...) as a description, and back into groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from swarmcli.sharding.zero.local_state import settings_of
from swarmcli.sharding.zero.state_tree import Node, put_together, take_apart


def describe_settings(groups: Sequence[Mapping[str, Any]]) -> Node:
    """Raises TypeError for a setting that is neither a number, text, None nor made of such."""
    return take_apart([_plain(settings_of(group)) for group in groups], [], "param_groups")


def apply_settings(groups: Sequence[dict[str, Any]], described: Node) -> None:
    """Sets what was described; a setting that is a tensor here stays that tensor. ValueError for other groups."""
    saved = put_together(described, iter(()))
    if not isinstance(saved, list) or len(saved) != len(groups):
        raise ValueError(f"the settings are not those of {len(groups)} parameter groups")
    for group, settings in zip(groups, saved, strict=True):
        for name, value in settings.items():
            if isinstance(group.get(name), torch.Tensor):
                group[name].fill_(value)
            else:
                group[name] = value


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in settings.items()
    }
