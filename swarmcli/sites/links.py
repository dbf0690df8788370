"""What the processes of a site say to each other directly, and how whoever waits for another learns that it is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from swarmcli.errors import SiteError

MAX_MESSAGE_BYTES = 64 << 20
FOREVER = timedelta(days=365)  # for as long as the other process lives: gloo notices a closed connection
_AT_ONCE = timedelta(milliseconds=1)
_NEVER_SENT = 1 << 20  # a tag


def send_bytes(group: dist.ProcessGroup, data: bytes, to: int, patience: timedelta | None = None) -> None:
    """To the rank `to` of the site, whose `receive_bytes` gets it. See send_numbers."""
    send_numbers(group, torch.tensor([len(data)]), to, patience)
    if data:
        send_numbers(group, torch.frombuffer(bytearray(data), dtype=torch.uint8), to, patience)


def receive_bytes(group: dist.ProcessGroup, source: int, patience: timedelta = FOREVER) -> bytes:
    """What `source` sends. `patience` is for its beginning. Raises SiteError: it is gone, or late."""
    length = torch.empty(1, dtype=torch.int64)
    receive_numbers(group, length, source, patience)
    count = int(length)
    if not 0 <= count <= MAX_MESSAGE_BYTES:
        raise SiteError(f"rank {source} announced a message of {count} bytes; at most {MAX_MESSAGE_BYTES} are taken")
    data = torch.empty(count, dtype=torch.uint8)
    if count:
        receive_numbers(group, data, source)
    return data.numpy().tobytes()


def send_numbers(group: dist.ProcessGroup, numbers: torch.Tensor, to: int, patience: timedelta | None = None) -> None:
    """A host tensor, to the rank `to` of the site. Raises SiteError.

    gloo sends nothing, not even one number, before the other end receives. For that the call waits `patience`; None:
    for rank 0 as long as it lives, since it may have to wait for the swarm, for another rank the group's timeout.
    """
    with named(f"rank {to} is gone, or does not take what it is sent"):
        work = dist.isend(numbers, dst=to, group=group)
        if work is None:
            raise SiteError("this process is not in the site's group")
        if patience is None and to:
            work.wait()
        else:
            work.wait(patience or FOREVER)


def receive_numbers(
    group: dist.ProcessGroup, numbers: torch.Tensor, source: int, patience: timedelta = FOREVER
) -> None:
    """Into the host tensor `numbers`. Raises SiteError: `source` is gone, or did not send within `patience`."""
    late = "" if patience == FOREVER else f", or sent nothing within {patience.total_seconds():g} s"
    with named(f"rank {source} is gone{late}"):
        work = dist.irecv(numbers, src=source, group=group)
        if work is None:
            raise SiteError("this process is not in the site's group")
        work.wait(patience)


def sever(group: dist.ProcessGroup) -> None:
    """Whoever waits for something in this group, in this process or another, gets an error now, and so do all later
    calls. Without effect on a group that is severed already, or that this process has left.

    A thread inside of a gloo call cannot be told anything, but gloo closes all connections of a group as soon as one
    wait in it has run out of time. A process that is gone already gives another error, which closes nothing; so all
    are tried.
    """
    try:
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    except (RuntimeError, ValueError, KeyError):
        return  # the group, or all of torch.distributed, has been taken apart here
    for rank in others:
        _wait_in_vain(group, rank)


def _wait_in_vain(group: dist.ProcessGroup, source: int) -> None:
    try:
        work = dist.irecv(torch.empty(1), src=source, group=group, tag=_NEVER_SENT)
        if work is not None:
            work.wait(_AT_ONCE)
    except (RuntimeError, ValueError):
        return  # the error that was asked for


@contextmanager
def named(what: str) -> Iterator[None]:
    """Errors of torch.distributed inside of the block become SiteErrors that begin with `what`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # ValueError: the group has been taken apart
        # gloo begins with the place in its source and ends with advice.
        reason = re.sub(r"^\[\S*\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
        raise SiteError(f"{what}: {reason:.300}") from error
