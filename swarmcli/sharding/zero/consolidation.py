"""The whole optimizer state on one rank: every other rank sends its share, one after the other, in bounded pieces."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from swarmcli.errors import ShardingError
from swarmcli.files.flat import unflatten
from swarmcli.sharding.transfer import receive_message, receive_tensors, send_message, send_tensors
from swarmcli.sharding.zero.state import State, copied_to_cpu, describe


class ShareHeader(msgspec.Struct, frozen=True):
    """A rank announces what it is about to send, or says why it cannot."""

    state: Any  # flattened
    tensors: list[tuple[str, str, list[int]]]  # name, type and shape, in the order in which they come
    failure: str = ""


def consolidate(share: State, to: int, group: dist.ProcessGroup, owners: Sequence[int]) -> dict[int, dict[str, Any]]:
    """All ranks' shares at rank `to`, copied to CPU memory, so that later steps do not change them; {} elsewhere.

    A collective call. `owners`: the rank of each parameter index. If a rank's state cannot be sent (only tensors, plain
    values, lists, tuples and dicts can), raises TypeError there and ShardingError at rank `to`.
    """
    rank = dist.get_rank(group)
    if rank != to:
        send_share(share, to, group)
        return {}
    whole = {index: copied_to_cpu(values) for index, values in share.items()}
    failures = []
    for source in range(dist.get_world_size(group)):
        if source != to:
            try:
                owned = [index for index, owner in enumerate(owners) if owner == source]
                whole.update(receive_share(source, group, owned))
            except ShardingError as error:
                failures.append(f"rank {source}: {error}")
    if failures:
        raise ShardingError(f"the optimizer state could not be consolidated: {'; '.join(failures)}")
    return dict(sorted(whole.items()))


def send_share(share: State, to: int, group: dist.ProcessGroup) -> None:
    """Sends state by parameter index to another rank, which calls `receive_share`. Raises TypeError as above."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        state = describe(share, tensors, "state")
    except TypeError as error:
        send_message(ShareHeader(None, [], str(error)), to, group)  # the other rank waits for a header
        raise
    announced = [(name, str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in tensors.items()]
    send_message(ShareHeader(state, announced), to, group)
    send_tensors(list(tensors.values()), to, group)


def receive_share(source: int, group: dist.ProcessGroup, expected: Collection[int]) -> dict[int, dict[str, Any]]:
    """The state that rank `source` sends, in CPU memory.

    Raises ShardingError if that rank cannot send it, and ValueError for anything but state of the parameters
    `expected`.
    """
    header = receive_message(ShareHeader, source, group)
    if header.failure:
        raise ShardingError(header.failure)
    tensors = {name: torch.empty(shape, dtype=_dtype(dtype)) for name, dtype, shape in header.tensors}
    try:
        state: dict[int, dict[str, Any]] = unflatten(header.state, tensors.__getitem__)
        foreign = [index for index in state if index not in expected]
    except (KeyError, TypeError) as error:
        raise ValueError(f"rank {source} announced what is no state by parameter: {error}") from error
    if foreign:
        raise ValueError(f"rank {source} sends state of parameters that are not its own: {foreign[:10]}")
    receive_tensors(list(tensors.values()), source, group)
    return state


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor of type {name!r} was announced, which this torch does not have")
    return dtype
