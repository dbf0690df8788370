"""Plain values as JSON and back, without loss: bytes, tuples' items, keys that are no text, infinities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BYTES = "$bytes"
_PAIRS = "$pairs"


def to_json(value: Any) -> Any:
    """Something that `json.dumps` takes. Tuples become lists. TypeError for what is no plain value."""
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {_PAIRS: [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is no plain value")


def from_json(value: Any) -> Any:
    """What `to_json` was given. ValueError for a form that it does not write."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_BYTES}:
        return bytes.fromhex(str(value[_BYTES]))
    if set(value) == {_PAIRS}:
        return {from_json(key): from_json(item) for key, item in value[_PAIRS]}
    return {key: from_json(item) for key, item in value.items()}
