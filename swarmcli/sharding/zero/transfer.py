"""Tensors from one rank to another, byte for byte, in pieces of bounded size.

The two ends agree on shapes and types beforehand. Small tensors share a piece, large ones are spread over several, so
that the memory besides the tensors is one piece at each end, and the number of messages depends on bytes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

PIECE_BYTES = 16 * 2**20


class Run(NamedTuple):
    """Bytes `start` to `stop` of a tensor, and where they lie in the piece."""

    tensor: int
    start: int
    stop: int
    offset: int


def pieces(lengths: Sequence[int], piece_bytes: int) -> Iterator[list[Run]]:
    """Lays tensors of so many bytes one behind the other and cuts them into pieces."""
    runs: list[Run] = []
    filled = 0
    for tensor, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + piece_bytes - filled)
            runs.append(Run(tensor, start, stop, filled))
            filled += stop - start
            start = stop
            if filled == piece_bytes:
                yield runs
                runs, filled = [], 0
    if runs:
        yield runs


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as flat uint8: a view of a contiguous tensor, of another one a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def message_device(group: dist.ProcessGroup) -> torch.device:
    """Where messages of this group have to lie: in CPU memory if it carries that, else on the device it serves."""
    served = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in served else served[0])


def gather_numbers(values: Sequence[float], group: dist.ProcessGroup) -> list[list[float]]:
    """The numbers of all ranks, by rank; all must give equally many. A collective call."""
    own = torch.tensor(values, dtype=torch.float64, device=message_device(group))
    everyones = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, own, group=group)
    return [tensor.tolist() for tensor in everyones]


def send_tensors(tensors: Sequence[torch.Tensor], to: int, group: dist.ProcessGroup) -> None:
    """Sends the tensors (any device) to rank `to` of the group, which receives into tensors of the same sizes.

    Raises RuntimeError when the other rank is gone or the group's timeout has passed.
    """
    target = dist.get_global_rank(group, to)
    sources = [as_bytes(tensor) for tensor in tensors]
    lengths = [source.numel() for source in sources]
    piece = _piece(lengths, message_device(group))
    for runs in pieces(lengths, PIECE_BYTES):
        for tensor, start, stop, offset in runs:
            piece[offset : offset + stop - start].copy_(sources[tensor][start:stop])
        dist.send(piece[: _filled(runs)], dst=target, group=group)


def receive_tensors(tensors: Sequence[torch.Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Fills the tensors (contiguous, any device) with what rank `source` of the group sends; its other end.

    Raises RuntimeError when the other rank is gone or the group's timeout has passed; some tensors are then written.
    """
    sender = dist.get_global_rank(group, source)
    targets = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    lengths = [target.numel() for target in targets]
    piece = _piece(lengths, message_device(group))
    for runs in pieces(lengths, PIECE_BYTES):
        dist.recv(piece[: _filled(runs)], src=sender, group=group)
        for tensor, start, stop, offset in runs:
            targets[tensor][start:stop].copy_(piece[offset : offset + stop - start])


def _piece(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.empty(min(sum(lengths), PIECE_BYTES), dtype=torch.uint8, device=device)


def _filled(runs: Sequence[Run]) -> int:
    last = runs[-1]
    return last.offset + last.stop - last.start
