"""The state of an optimizer by parameter: which entries a rank owns, on which device their tensors belong, and how
state and settings are written or sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch

from swarmcli.files.flat import flatten, unflatten

State = Mapping[int, Mapping[str, Any]]  # statistics by the parameter's place in the parameter groups
NOT_SETTINGS = ("params", "param_names")


def copy_settings(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copies all but the parameters themselves, group by group. Both must have equally many groups."""
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update(settings_of(from_group))


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group besides its parameters: the learning rate and its like."""
    return {name: value for name, value in group.items() if name not in NOT_SETTINGS}


def own_entries(state_dict: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]], owned: Iterable[int]) -> Any:
    """From a state dict, the state of the parameters `owned`, by index. Raises ValueError for a dict of other groups,
    and TypeError or ValueError for anything but a state dict.

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
    """A copy of a state value on the device where the optimizer expects it, which is mostly the parameter's.
    Without `copy`, a tensor that is on that device already is taken as it is.

    Zero-dimensional tensors (Adam's step) stay on the CPU, unless the group is `capturable` or `fused`, whose kernels
    count their steps on the device.
    """
    counted_on_device = group.get("capturable") or group.get("fused")

    def place(tensor: torch.Tensor) -> torch.Tensor:
        device = torch.device("cpu") if tensor.dim() == 0 and not counted_on_device else parameter.device
        return tensor.detach().to(device, copy=copy)

    return map_tensors(place, value)


def copied_to_cpu(value: Any) -> Any:
    """The value with copies in CPU memory of all tensors in it."""
    return map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), value)


def map_tensors(change: Callable[[Any], Any], value: Any, *, kinds: type | tuple[type, ...] = torch.Tensor) -> Any:
    """The value with each tensor in it (or value of `kinds`) replaced by what `change` returns for it; within lists,
    tuples and mappings too."""
    if isinstance(value, kinds):
        return change(value)
    if isinstance(value, list | tuple):
        parts = [map_tensors(change, item, kinds=kinds) for item in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, Mapping):
        return {key: map_tensors(change, item, kinds=kinds) for key, item in value.items()}
    return value


def describe(value: Any, tensors: dict[str, torch.Tensor], place: str) -> Any:
    """As `flatten`, but only for values that msgpack can carry: integers of 64 bits, text in UTF-8, no value within
    itself.

    Raises TypeError, which names the place, for anything that could not be read again.
    """
    try:
        described = flatten(value, tensors, place)
        msgspec.msgpack.encode(described)
    except (OverflowError, ValueError) as error:
        raise TypeError(f"{place} cannot be written: {error}") from error
    except RecursionError:
        raise TypeError(f"{place} cannot be written: it is nested too deeply") from None
    except TypeError as error:
        raise TypeError(str(error) if place in str(error) else f"{place} cannot be written: {error}") from error
    return described


def describe_settings(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings of parameter groups as plain values. Tensors of one element become numbers, within tuples too.

    Raises TypeError for a setting that is neither a number, text, None nor made of such.
    """
    return [
        {
            name: _describe_setting(f"param_groups[{place}][{name!r}]", value)
            for name, value in settings_of(group).items()
        }
        for place, group in enumerate(groups)
    ]


def _describe_setting(place: str, value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}

    def number_of(found: Any) -> Any:
        return found.item() if isinstance(found, np.generic) or found.numel() == 1 else found

    plain = map_tensors(number_of, value, kinds=(torch.Tensor, np.generic))
    described = describe(plain, tensors, place)
    for tensor in tensors.values():
        raise TypeError(
            f"{place} has a tensor of {tensor.numel()} elements, which cannot be written: "
            "only numbers and tensors of one element can"
        )
    return described


def apply_settings(groups: Sequence[dict[str, Any]], described: Sequence[Mapping[str, Any]]) -> None:
    """Sets what `describe_settings` described; a setting that is a tensor here stays that tensor. Raises ValueError
    for other groups."""
    if len(described) != len(groups):
        raise ValueError(f"the settings are not those of {len(groups)} parameter groups")
    for group, settings in zip(groups, described, strict=True):
        for name, value in settings.items():
            group[name] = _renewed(group.get(name), unflatten(value, _no_tensor))


def _no_tensor(name: str) -> torch.Tensor:
    raise ValueError(f"the settings have a tensor {name}, which is not with them")


def _renewed(here: Any, saved: Any) -> Any:
    """The saved value, written into the tensors that are here, if any: captured graphs may hold these."""
    if isinstance(here, torch.Tensor) and here.numel() == 1 and isinstance(saved, bool | int | float):
        here.detach().fill_(saved)
        return here
    if isinstance(saved, list | tuple) and isinstance(here, list | tuple) and len(here) == len(saved):
        parts = [_renewed(own, item) for own, item in zip(here, saved, strict=True)]
        return tuple(parts) if isinstance(saved, tuple) else parts
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        return {key: _renewed(here.get(key), item) for key, item in saved.items()}
    return saved
