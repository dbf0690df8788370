"""How bytes travel between the ranks of a process group: tensors and messages to one rank, or to all.

Both ends agree on shapes and types beforehand. Tensors travel as bytes, so any type will do. Short ones share a
message, long ones are cut into pieces of bounded size without copying: so beside the tensors one piece is in memory at
each end, and the number of messages depends on bytes alone.

Every function raises RuntimeError if another rank is gone or a wait takes too long, and ValueError for a message that
is too long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from swarmcli.network import wire

T = TypeVar("T")


# Bytes. The same at all ranks of a group.
PIECE = 16 << 20  # of long tensors, that travel at once
MOST = 64 << 20  # of a message, at most
SHORT = 64 << 10  # of a tensor, up to which copying it costs less than a message of its own
PACK = 1 << 20  # of short tensors that are broadcast together


class Run(NamedTuple):
    """Elements `start` to `stop` of one of several tensors."""

    tensor: int
    start: int
    stop: int


def runs_of(lengths: Sequence[int], longest: int) -> Iterator[list[Run]]:
    """Concatenates tensors of these numbers of elements and cuts them into pieces of `longest`; the last may be
    shorter."""
    runs: list[Run] = []
    room = longest
    for tensor, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            runs.append(Run(tensor, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield runs
                runs, room = [], longest
    if runs:
        yield runs


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as flat uint8: a view if the tensor is contiguous, otherwise a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def message_device(group: dist.ProcessGroup) -> torch.device:
    """Where messages of this group have to lie: in CPU memory if its backend takes that, else on the backend's
    device."""
    served = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in served else served[0])


# From one rank to another


def send_tensors(
    tensors: Sequence[torch.Tensor], to: int, group: dist.ProcessGroup, patience: timedelta | None = None
) -> None:
    """Sends the tensors (any device) to rank `to` of the group, which receives into tensors of the same sizes.

    gloo sends nothing, not even one number, before the other end receives. Each piece waits for that, at most for
    `patience`; None: the group's timeout.
    """
    target, device = dist.get_global_rank(group, to), message_device(group)
    sources = [as_bytes(tensor) for tensor in tensors]
    for runs in runs_of([source.numel() for source in sources], PIECE):
        parts = [sources[run.tensor][run.start : run.stop].to(device) for run in runs]
        _finish(dist.isend(_joined(parts), dst=target, group=group), patience)


def receive_tensors(
    tensors: Sequence[torch.Tensor], source: int, group: dist.ProcessGroup, patience: timedelta | None = None
) -> None:
    """Fills the tensors (contiguous, any device) with what rank `source` of the group sends by `send_tensors`.

    After an error some tensors may have been written. `patience`: for each piece; None: the group's timeout.
    """
    sender, device = dist.get_global_rank(group, source), message_device(group)
    targets = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    for runs in runs_of([target.numel() for target in targets], PIECE):
        parts = [targets[run.tensor][run.start : run.stop] for run in runs]
        message = _room_for(parts, device)
        _finish(dist.irecv(message, src=sender, group=group), patience)
        _hand_out(message, parts)


def send_message(message: Any, to: int, group: dist.ProcessGroup, patience: timedelta | None = None) -> None:
    """Sends a struct or plain value that msgpack carries to rank `to` of the group, whose `receive_message` gets it.
    `patience`: see send_tensors."""
    data = wire.encode(message)
    if len(data) > MOST:
        raise ValueError(f"a message of {len(data)} bytes is too long; at most {MOST} are taken")
    send_tensors([torch.tensor([len(data)])], to, group, patience)
    send_tensors([torch.frombuffer(bytearray(data), dtype=torch.uint8)], to, group, patience)


def receive_message(kind: type[T], source: int, group: dist.ProcessGroup, patience: timedelta | None = None) -> T:
    """What rank `source` of the group sends by `send_message`. Raises ValueError for a message of another kind."""
    length = torch.empty(1, dtype=torch.int64)
    receive_tensors([length], source, group, patience)
    if not 0 < int(length) <= MOST:  # before memory is taken for it
        raise ValueError(f"rank {source} announced a message of {int(length)} bytes; at most {MOST} are taken")
    data = torch.empty(int(length), dtype=torch.uint8)
    receive_tensors([data], source, group, patience)
    return wire.decode(kind, data.numpy().tobytes())


# From all ranks to all


def gather_numbers(values: Sequence[float], group: dist.ProcessGroup) -> list[list[float]]:
    """The numbers of all ranks, by rank; all must give equally many. A collective call."""
    own = torch.tensor(values, dtype=torch.float64, device=message_device(group))
    everyones = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, own, group=group)
    return [tensor.tolist() for tensor in everyones]


def broadcast_from_owners(tensors_by_rank: Sequence[Sequence[torch.Tensor]], group: dist.ProcessGroup) -> None:
    """Every rank sends its own tensors to all and overwrites those of the others with what their owners send.

    They may be on several devices; one that is not contiguous goes through a copy. Returns when all are there. After an
    error some tensors may have been overwritten.
    """
    if dist.get_world_size(group) == 1:
        return
    own_rank = dist.get_rank(group)
    under_way, copies = [], []
    for rank, tensors in enumerate(tensors_by_rank):
        source = dist.get_global_rank(group, rank)
        whole = [tensor.detach().contiguous() for tensor in tensors]
        for parts in packs([each.view(-1).view(torch.uint8) for each in whole]):
            message = _joined(parts) if rank == own_rank else _room_for(parts, parts[0].device)
            work = dist.broadcast(message, src=source, group=group, async_op=True)
            under_way.append((work, message, [message] if rank == own_rank else parts))
        if rank != own_rank:
            copies += [pair for pair in zip(tensors, whole, strict=True) if not pair[0].is_contiguous()]
    for work, message, parts in under_way:
        work.wait()
        _hand_out(message, parts)
    for tensor, arrived in copies:
        tensor.detach().copy_(arrived)


def packs(flat: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors of each message, by size and device, so that all ranks agree: a long tensor alone, short ones
    together."""
    yield from ([tensor] for tensor in flat if tensor.numel() > SHORT)
    for device in dict.fromkeys(tensor.device for tensor in flat):
        short = [tensor for tensor in flat if tensor.device == device and tensor.numel() <= SHORT]
        for runs in runs_of([tensor.numel() for tensor in short], PACK):
            yield [short[run.tensor][run.start : run.stop] for run in runs]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One message of these parts; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _room_for(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Memory for a message of these parts: a single part's own, if messages of the group lie on its device."""
    if len(parts) == 1 and parts[0].device.type == device.type:
        return parts[0]
    return torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8, device=device)


def _hand_out(message: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    if message is not parts[0]:
        for part, arrived in zip(parts, message.split([part.numel() for part in parts]), strict=True):
            part.copy_(arrived)


def _finish(work: dist.Work | None, patience: timedelta | None) -> None:
    if work is None:
        raise RuntimeError("this process is not in the group")
    if patience is None:
        work.wait()
    else:
        work.wait(patience)
