"""Descriptions that can be written or sent, and will be understood when they are read."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from swarmcli.network import wire
from swarmcli.sharding.zero.state_tree import Node, take_apart


class _Described(msgspec.Struct, frozen=True):
    node: Node


def describe(value: Any, tensors: list[torch.Tensor], place: str) -> Node:
    """As `take_apart`, for what msgpack carries: integers of 64 bits, text that is UTF-8, no value within itself.

    Raises TypeError, which names `place`, where `take_apart` does and for anything else that could not be read again.
    """
    try:
        node = take_apart(value, tensors, place)
        wire.decode(_Described, wire.encode(_Described(node)))
    except (OverflowError, ValueError, msgspec.DecodeError) as error:
        raise TypeError(f"{place} cannot be written: {error}") from error
    except RecursionError:
        raise TypeError(f"{place} cannot be written: it is nested too deeply") from None
    except TypeError as error:
        raise TypeError(str(error) if place in str(error) else f"{place} cannot be written: {error}") from error
    return node
