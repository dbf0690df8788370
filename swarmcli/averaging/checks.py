"""Checks of arguments; errors name the argument, its value and the expected one."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from numbers import Real

import torch

MAX_BANDWIDTH = 1e12  # in whatever unit: no line carries so many bytes per second, and sums of such figures are finite


def check_numbers(optional: bool = False, **values: object) -> None:
    """Raises TypeError for any value that is no number (nor None, where that is `optional`)."""
    for name, value in values.items():
        if isinstance(value, bool) or not (isinstance(value, Real) or (optional and value is None)):
            raise TypeError(f"{name} must be a number{' or None' if optional else ''}, got {value!r}")


def as_count(value: object, name: str, *, least: int = 0) -> int:
    """Returns the value as an int; numpy's and torch's integers are fine. Raises TypeError for anything but a whole
    number, ValueError below `least`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}={value!r}: expected a whole number") from None
    if count < least:
        raise ValueError(f"{name}={count}: expected at least {least}")
    return count


def check_flags(**values: object) -> None:
    """Raises TypeError for any value but True and False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: expected True or False")


def check_text(**values: object) -> None:
    """Raises TypeError for any value that is no text."""
    for name, value in values.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a text, got {value!r}")


def check_tensors(tensors: Sequence[object]) -> None:
    """Raises TypeError for anything but a sequence of tensors, and ValueError if two of them, or elements of one, share
    memory: averaging in place would write to it twice."""
    if isinstance(tensors, torch.Tensor):
        raise TypeError("averaged_tensors must be a list of tensors, got a single tensor; put it in a list")
    spans: list[tuple[str, int, int, int]] = []
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"averaged_tensors[{index}] must be a tensor, got {type(tensor).__name__}")
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        if any(extent > 1 and stride == 0 for extent, stride in strides):
            raise ValueError(f"averaged_tensors[{index}] is expanded: several elements are one in memory; clone() it")
        if tensor.is_contiguous() and tensor.numel():
            spans.append((str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, index))
    for (device, _, end, first), (other, begin, _, second) in pairwise(sorted(spans)):
        if device == other and begin < end:
            first, second = sorted((first, second))
            raise ValueError(f"averaged_tensors[{first}] and [{second}] share memory; each must have its own")
