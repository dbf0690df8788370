"""An optimizer's state as a description that msgpack can carry, and the tensors it speaks of beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import torch

PlainValue = None | bool | int | float | str


class TensorNode(msgspec.Struct, tag="tensor", frozen=True):
    """The next one of the tensors beside."""

    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]


class PlainNode(msgspec.Struct, tag="plain", frozen=True):
    value: PlainValue


class SequenceNode(msgspec.Struct, tag="sequence", frozen=True):
    items: list[Node]
    is_tuple: bool


class MappingNode(msgspec.Struct, tag="mapping", frozen=True):
    entries: list[tuple[str | int, Node]]


Node = TensorNode | PlainNode | SequenceNode | MappingNode


def take_apart(value: Any, tensors: list[torch.Tensor], place: str = "state") -> Node:
    """Describes the value and appends its tensors to `tensors`, in the order of the description.

    Raises TypeError for a value that is neither a tensor, a plain value, nor a list, tuple or dict of such; `place`
    names it there.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return TensorNode(str(value.dtype).removeprefix("torch."), list(value.shape))
    if isinstance(value, PlainValue):
        return PlainNode(value)
    if isinstance(value, list | tuple):
        items = [take_apart(item, tensors, f"{place}[{position}]") for position, item in enumerate(value)]
        return SequenceNode(items, isinstance(value, tuple))
    if isinstance(value, Mapping):
        return MappingNode([_entry(key, item, tensors, place) for key, item in value.items()])
    raise TypeError(f"{place} is a {type(value).__name__}, which cannot be sent: only tensors and plain values can")


def _entry(key: Any, value: Any, tensors: list[torch.Tensor], place: str) -> tuple[str | int, Node]:
    if not isinstance(key, str | int):
        raise TypeError(f"a key of {place} is a {type(key).__name__}, which cannot be sent: only text and numbers can")
    return key, take_apart(value, tensors, f"{place}[{key!r}]")


def tensor_nodes(node: Node) -> Iterator[TensorNode]:
    """The tensors that a description speaks of, in its order."""
    match node:
        case TensorNode():
            yield node
        case SequenceNode(items):
            for item in items:
                yield from tensor_nodes(item)
        case MappingNode(entries):
            for _, item in entries:
                yield from tensor_nodes(item)


def empty_tensors(node: Node) -> Iterator[torch.Tensor]:
    """Empty CPU tensors for everything the description speaks of, in its order. Raises ValueError for unknown types."""
    return (torch.empty(each.shape, dtype=_dtype(each.dtype)) for each in tensor_nodes(node))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor of type {name!r} was announced, which this torch does not have")
    return dtype


def put_together(node: Node, tensors: Iterator[torch.Tensor]) -> Any:
    """The value described, with the tensors in their places."""
    match node:
        case TensorNode():
            return next(tensors)
        case PlainNode(value):
            return value
        case SequenceNode(items, is_tuple):
            parts = [put_together(item, tensors) for item in items]
            return tuple(parts) if is_tuple else parts
        case MappingNode(entries):
            return {key: put_together(item, tensors) for key, item in entries}
