"""Short messages of every rank to every rank of a group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from swarmcli.errors import CheckpointError
from swarmcli.network import wire
from swarmcli.sharding.zero.transfer import message_device

MAX_BYTES = 64 * 2**20


def exchange(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """What each rank gave, by rank. A collective call; RuntimeError when a rank is gone or the timeout has passed.

    Takes the longest message times the number of ranks in memory.
    """
    device = message_device(group)
    size = dist.get_world_size(group)
    lengths = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=group)
    longest = max(int(length) for length in lengths)
    if longest > MAX_BYTES:
        raise ValueError(f"a message of {longest} bytes was announced; at most {MAX_BYTES} are taken")
    if not longest:
        return [b""] * size
    padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    received = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(size)]
    dist.all_gather(received, padded, group=group)
    return [each[: int(n)].cpu().numpy().tobytes() for each, n in zip(received, lengths, strict=True)]


def agree(problem: str | None, group: dist.ProcessGroup) -> None:
    """Returns at all ranks if none has a problem, else raises CheckpointError with all their words. A collective."""
    told = [
        wire.decode(str, each) if each else "" for each in exchange(wire.encode(problem) if problem else b"", group)
    ]
    if any(told):
        raise CheckpointError("; ".join(dict.fromkeys(text for text in told if text)))
