"""Nested state (an optimizer's, a scheduler's) as JSON and named tensors, and back without loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_TENSOR = "$tensor"
_TUPLE = "$tuple"
_BYTES = "$bytes"
_PAIRS = "$pairs"  # a mapping with keys that are no text, or that look like one of these marks


def flatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What `json.dumps` takes; each tensor in `value` is put into `tensors` under a name of its own.

    TypeError for what is no mapping, list, tuple, tensor, bytes, text, number or None.
    """
    match value:
        case Tensor():
            name = str(len(tensors))
            tensors[name] = value
            return {_TENSOR: name}
        case Mapping():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: flatten(item, tensors) for key, item in value.items()}
            return {_PAIRS: [[flatten(key, tensors), flatten(item, tensors)] for key, item in value.items()]}
        case tuple():
            return {_TUPLE: [flatten(item, tensors) for item in value]}
        case list():
            return [flatten(item, tensors) for item in value]
        case bytes():
            return {_BYTES: value.hex()}
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"a {type(value).__name__} cannot be part of a checkpoint")


def unflatten(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `flatten` was given. KeyError, TypeError or ValueError for what it does not write."""
    match value:
        case list():
            return [unflatten(item, tensors) for item in value]
        case {"$tensor": name, **rest} if not rest:
            return tensors[name]
        case {"$tuple": items, **rest} if not rest:
            return tuple(unflatten(item, tensors) for item in items)
        case {"$bytes": digits, **rest} if not rest:
            return bytes.fromhex(digits)
        case {"$pairs": pairs, **rest} if not rest:
            return {unflatten(key, tensors): unflatten(item, tensors) for key, item in pairs}
        case dict():
            return {key: unflatten(item, tensors) for key, item in value.items()}
    return value
