"""The whole optimizer state on one rank: every other rank sends its share, one after the other, in bounded pieces."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from swarmcli.errors import ShardingError
from swarmcli.network import wire
from swarmcli.sharding.zero.state_tree import MappingNode, Node, empty_tensors, put_together, take_apart
from swarmcli.sharding.zero.transfer import receive_tensors, send_tensors

HEADER_BYTES = 64 * 2**20  # some hundred bytes for each parameter

State = dict[int, dict[str, Any]]  # by global parameter index


class ShareHeader(msgspec.Struct, frozen=True):
    """What a rank is about to send, or why it cannot."""

    state: Node | None
    failure: str = ""


def consolidate(
    share: Mapping[int, Mapping[str, Any]], to: int, group: dist.ProcessGroup, owners: Sequence[int]
) -> State:
    """All ranks' shares at rank `to`, in CPU memory, as a copy that later steps do not change; elsewhere nothing.

    A collective call. `owners` says whose each parameter index is. Raises TypeError at the rank whose state cannot be
    sent (only tensors, plain values, lists, tuples and dicts can) and ShardingError at rank `to`.
    """
    rank = dist.get_rank(group)
    if rank != to:
        send_share(share, to, group)
        return {}
    whole: State = {index: copied(values) for index, values in share.items()}
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


def send_share(share: Mapping[int, Mapping[str, Any]], to: int, group: dist.ProcessGroup) -> None:
    """Sends state by parameter index to another rank, which calls `receive_share`. Raises TypeError as above."""
    tensors: list[torch.Tensor] = []
    try:
        header = ShareHeader(take_apart(share, tensors))
        encoded = wire.encode(header)
    except (TypeError, OverflowError) as error:
        _send_bytes(wire.encode(ShareHeader(None, failure=str(error))), to, group)
        raise
    _send_bytes(encoded, to, group)
    send_tensors(tensors, to, group)


def receive_share(source: int, group: dist.ProcessGroup, expected: Collection[int]) -> State:
    """The state that rank `source` sends, in CPU memory.

    Raises ShardingError when it cannot send it, and ValueError for what is no state of the parameters `expected`.
    """
    header = wire.decode(ShareHeader, _receive_bytes(source, group))
    if header.state is None:
        raise ShardingError(header.failure)
    if not isinstance(header.state, MappingNode):
        raise ValueError(f"rank {source} announced a {type(header.state).__name__} in place of state by parameter")
    foreign = [index for index, _ in header.state.entries if index not in expected]
    if foreign:
        raise ValueError(f"rank {source} sends state of parameters that are not its own: {foreign[:10]}")
    tensors = list(empty_tensors(header.state))
    receive_tensors(tensors, source, group)
    state: State = put_together(header.state, iter(tensors))
    return state


def copied(value: Any) -> Any:
    """The value with all tensors in it copied to CPU memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, list | tuple):
        parts = [copied(item) for item in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    return value


def _send_bytes(data: bytes, to: int, group: dist.ProcessGroup) -> None:
    if len(data) > HEADER_BYTES:
        raise ValueError(f"the description of the state takes {len(data)} bytes, more than {HEADER_BYTES}")
    send_tensors([torch.tensor(len(data))], to, group)
    send_tensors([torch.frombuffer(bytearray(data), dtype=torch.uint8)], to, group)


def _receive_bytes(source: int, group: dist.ProcessGroup) -> bytes:
    length = torch.tensor(0)
    receive_tensors([length], source, group)
    if not 0 < int(length) <= HEADER_BYTES:
        raise ValueError(f"rank {source} announced a description of {int(length)} bytes, more than {HEADER_BYTES}")
    data = torch.empty(int(length), dtype=torch.uint8)
    receive_tensors([data], source, group)
    return data.numpy().tobytes()
