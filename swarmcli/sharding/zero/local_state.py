"""State dicts and the share of one rank: which entries are its own, and where their tensors belong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

NOT_SETTINGS = ("params", "param_names")


def copy_settings(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Everything but the parameters themselves, group by group; the groups must be as many."""
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update(settings_of(from_group))


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says besides its parameters: the learning rate and its like."""
    return {name: value for name, value in group.items() if name not in NOT_SETTINGS}


def own_entries(state_dict: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]], owned: Iterable[int]) -> Any:
    """The state in a state dict of the parameters `owned`, by index. Raises ValueError for a dict of other groups, and
    TypeError or ValueError for what is no state dict.

    The dict numbers parameters in its groups, in their order, as every optimizer's state dict does.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict is a {torch.typename(state_dict)}: pass what an optimizer's state_dict() returned")
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(
            f"state_dict has no {' and no '.join(map(repr, missing))} (only {sorted(map(str, state_dict))[:10]}): pass "
            "what an optimizer's state_dict() returned, after consolidate_state_dict at all ranks"
        )
    saved_groups = state_dict["param_groups"]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    sizes = [len(group["params"]) for group in param_groups]
    if saved_sizes != sizes:
        raise ValueError(
            f"the state dict is of parameter groups with {saved_sizes} parameters, this optimizer's have {sizes}: "
            "make the same groups in the same order (add_param_group) before loading"
        )
    names = list(chain.from_iterable(group["params"] for group in saved_groups))
    state = state_dict["state"]
    return {index: state[names[index]] for index in owned if state.get(names[index])}


def placed(value: Any, parameter: torch.Tensor, group: Mapping[str, Any], *, copy: bool = True) -> Any:
    """A copy of a state value where the optimizer expects it: on the parameter's device, in its own type.
    Without `copy` what is there already is taken as it is.

    Zero-dimensional tensors (Adam's step) stay on the CPU, unless the group is `capturable` or `fused`, whose kernels
    count their steps on the device.
    """
    if isinstance(value, torch.Tensor):
        counted_on_device = group.get("capturable") or group.get("fused")
        device = torch.device("cpu") if value.dim() == 0 and not counted_on_device else parameter.device
        return value.detach().to(device, copy=copy)
    if isinstance(value, list | tuple):
        parts = [placed(item, parameter, group, copy=copy) for item in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, Mapping):
        return {key: placed(item, parameter, group, copy=copy) for key, item in value.items()}
    return value
