"""The settings of parameter groups (learning rate, betas, ...) as a description, and back into groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from swarmcli.sharding.files.describing import describe
from swarmcli.sharding.zero.local_state import settings_of
from swarmcli.sharding.zero.state_tree import MappingNode, Node, SequenceNode, put_together


def describe_settings(groups: Sequence[Mapping[str, Any]]) -> Node:
    """Tensors of one element are described as numbers, also where they lie in tuples, lists and dicts.

    Raises TypeError for a setting that is neither a number, text, None nor made of such.
    """
    return SequenceNode([_describe_group(f"param_groups[{place}]", group) for place, group in enumerate(groups)], False)


def apply_settings(groups: Sequence[dict[str, Any]], described: Node) -> None:
    """Sets what was described; a setting that is a tensor here stays that tensor. ValueError for other groups."""
    saved = put_together(described, iter(()))
    if not isinstance(saved, list) or len(saved) != len(groups):
        raise ValueError(f"the settings are not those of {len(groups)} parameter groups")
    for group, settings in zip(groups, saved, strict=True):
        for name, value in settings.items():
            group[name] = _renewed(group.get(name), value)


def _describe_group(place: str, group: Mapping[str, Any]) -> Node:
    entries: list[tuple[str | int, Node]] = []
    for name, value in settings_of(group).items():
        tensors: list[torch.Tensor] = []
        entries.append((name, describe(_plain(value), tensors, f"{place}[{name!r}]")))
        if tensors:
            raise TypeError(
                f"{place}[{name!r}] has a tensor of {tensors[0].numel()} elements, which cannot be written: "
                "only numbers and tensors of one element can"
            )
    return MappingNode(entries)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, list | tuple):
        parts = [_plain(item) for item in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _renewed(here: Any, saved: Any) -> Any:
    """What was saved, in the tensors that are here: captured graphs and others may hold them."""
    if isinstance(here, torch.Tensor) and here.numel() == 1 and isinstance(saved, bool | int | float):
        here.detach().fill_(saved)
        return here
    if isinstance(saved, list | tuple) and isinstance(here, list | tuple) and len(here) == len(saved):
        parts = [_renewed(own, item) for own, item in zip(here, saved, strict=True)]
        return tuple(parts) if isinstance(saved, tuple) else parts
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        return {key: _renewed(here.get(key), item) for key, item in saved.items()}
    return saved
