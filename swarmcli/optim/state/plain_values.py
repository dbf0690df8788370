"""Settings of optimizers and schedulers as values that msgpack carries, and back, checked against one's own.

What arrives from a donor is fitted to a template, the value that this peer holds in the same place: the same keys,
the same kinds. So a donor can change a learning rate, never what kind of thing it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

_Scalar = (bool, int, float, str)


def is_plain(value: Any) -> bool:
    """Whether `to_plain` can express the value."""
    if value is None or isinstance(value, _Scalar):
        return True
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, Mapping) and all(isinstance(k, str | int) and is_plain(v) for k, v in value.items())


def to_plain(value: Any) -> Any:
    """The value made of dicts, lists, numbers, strings and None. Mapping entries that are not plain are left out."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items() if is_plain(item)}
    return value


def fit(template: Any, value: Any, where: str) -> Any:
    """`value` in the form of `template`. Raises ValueError naming the place where they differ in kind."""
    if isinstance(template, Mapping):
        return _fit_mapping(template, value, where)
    if isinstance(template, list | tuple):
        return _fit_sequence(template, value, where)
    if isinstance(template, torch.Tensor):
        return torch.full_like(template, _number(value, where))
    if template is None:
        if value is not None and not isinstance(value, _Scalar):
            raise ValueError(f"{where}: expected nothing or a scalar, got {type(value).__name__}")
        return value
    if isinstance(template, bool | str):
        if type(value) is not type(template):
            raise ValueError(f"{where}: expected {type(template).__name__}, got {type(value).__name__}")
        return value
    return _number(value, where)


def _fit_mapping(template: Mapping[Any, Any], value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected a mapping, got {type(value).__name__}")
    shared = {key for key, item in template.items() if is_plain(item)}
    if set(value) != shared:
        differing = sorted(map(str, set(value) ^ shared))[:5]
        raise ValueError(f"{where}: keys differ in {', '.join(differing)}")
    fitted = {key: fit(item, value[key], f"{where}.{key}") if key in shared else item for key, item in template.items()}
    return fitted if type(template) is dict else type(template)(fitted)  # type: ignore[call-arg]


def _fit_sequence(template: list[Any] | tuple[Any, ...], value: Any, where: str) -> Any:
    if not isinstance(value, list | tuple) or len(value) != len(template):
        raise ValueError(f"{where}: expected {len(template)} items, got {value!r:.60}")
    return type(template)(fit(t, v, f"{where}[{i}]") for i, (t, v) in enumerate(zip(template, value, strict=True)))


def _number(value: Any, where: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{where}: expected a number, got {value!r:.60}")
    return value
