"""Nested state (an optimizer's, a scheduler's) as plain values and named tensors, and back without loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

_TENSOR = "$tensor"
_TUPLE = "$tuple"
_BYTES = "$bytes"
_PAIRS = "$pairs"  # a mapping with keys that are no text, or that look like one of these marks


def flatten(value: Any, tensors: dict[str, Tensor], place: str = "state") -> Any:
    """Returns what JSON and msgpack can carry; each tensor in `value` is put into `tensors` under a name of its own.

    The name says where the tensor was: `state/0/exp_avg`. `place` is the beginning of all names.
    Raises TypeError, which names the place, for what is no mapping, list, tuple, tensor, bytes, text, number or None.
    """
    match value:
        case Tensor():
            name = place
            while name in tensors:  # keys with slashes in them
                name += "'"
            tensors[name] = value
            return {_TENSOR: name}
        case Mapping():
            items = [(key, flatten(item, tensors, f"{place}/{key}")) for key, item in value.items()]
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return dict(items)
            return {_PAIRS: [[flatten(key, tensors, f"a key of {place}"), item] for key, item in items]}
        case tuple() | list():
            parts = [flatten(item, tensors, f"{place}/{position}") for position, item in enumerate(value)]
            return {_TUPLE: parts} if isinstance(value, tuple) else parts
        case bytes():
            return {_BYTES: value.hex()}
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(
        f"{place} is a {type(value).__name__}: only tensors, plain values, and mappings, lists and tuples of such can "
        "be saved or sent"
    )


def unflatten(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Returns what `flatten` was given; `tensor` has the tensors by name.

    Raises KeyError, TypeError or ValueError for what `flatten` does not write, and what `tensor` raises.
    """
    match value:
        case list():
            return [unflatten(item, tensor) for item in value]
        case {"$tensor": name, **rest} if not rest:
            return tensor(name)
        case {"$tuple": items, **rest} if not rest:
            return tuple(unflatten(item, tensor) for item in items)
        case {"$bytes": digits, **rest} if not rest:
            return bytes.fromhex(digits)
        case {"$pairs": pairs, **rest} if not rest:
            return {unflatten(key, tensor): unflatten(item, tensor) for key, item in pairs}
        case dict():
            return {key: unflatten(item, tensor) for key, item in value.items()}
    return value
