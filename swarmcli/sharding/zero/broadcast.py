"""Every rank's parameters to all others: long tensors as they lie, short ones packed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from swarmcli.sharding.zero.transfer import as_bytes

SHORT_BYTES = 64 * 2**10  # up to here copying a tensor costs less than a message of its own
PACK_BYTES = 2**20


def broadcast_from_owners(tensors_by_rank: Sequence[Sequence[torch.Tensor]], group: dist.ProcessGroup) -> None:
    """Every rank sends its own tensors to all and overwrites those of the others with what their owners send.

    Tensors travel as bytes, so that any type does, also of several devices; one that is not contiguous goes through a
    copy. Returns when all are there. Raises RuntimeError when a rank is gone or the group's timeout has passed; some
    tensors are then new.
    """
    if dist.get_world_size(group) == 1:
        return
    own_rank = dist.get_rank(group)
    under_way = []
    for rank, tensors in enumerate(tensors_by_rank):
        source = dist.get_global_rank(group, rank)
        for pack in packs(tensors):
            message = _packed(pack) if rank == own_rank else _room_for(pack)
            work = dist.broadcast(message, src=source, group=group, async_op=True)
            under_way.append((work, pack, None if rank == own_rank else message))
    for work, pack, received in under_way:
        work.wait()
        if received is not None:
            _unpack(received, pack)


def packs(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors that share a message, by size and device, in which all ranks agree; empty ones are left out."""
    open_packs: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if _bytes(tensor) > SHORT_BYTES:
            yield [tensor]
        elif _bytes(tensor):
            pack = open_packs.setdefault(tensor.device, [])
            if sum(map(_bytes, pack)) + _bytes(tensor) > PACK_BYTES:
                yield open_packs[tensor.device]
                pack = open_packs[tensor.device] = []
            pack.append(tensor)
    yield from open_packs.values()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _packed(pack: Sequence[torch.Tensor]) -> torch.Tensor:
    parts = [as_bytes(tensor) for tensor in pack]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _room_for(pack: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where to receive: the tensor's own memory, if it is one contiguous tensor."""
    if len(pack) == 1 and pack[0].is_contiguous():
        return as_bytes(pack[0])
    return torch.empty(sum(map(_bytes, pack)), dtype=torch.uint8, device=pack[0].device)


def _unpack(message: torch.Tensor, pack: Sequence[torch.Tensor]) -> None:
    for tensor, part in zip(pack, message.split([_bytes(tensor) for tensor in pack]), strict=True):
        whole = tensor.detach().contiguous()
        target = as_bytes(whole)
        if target.data_ptr() != part.data_ptr():
            target.copy_(part)
        if not tensor.is_contiguous():
            tensor.detach().copy_(whole)
