"""How the processes of a site send to each other, and how a process that waits for another learns that it is gone.

The functions are those of sharding/transfer.py, with a site's patience, and with SiteErrors that name the rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from swarmcli.errors import SiteError
from swarmcli.sharding import transfer

T = TypeVar("T")
FOREVER = timedelta(days=365)  # as long as the other process lives: gloo notices a closed connection


def send_message(group: dist.ProcessGroup, message: Any, to: int, patience: timedelta | None = None) -> None:
    """Sends to rank `to` of the site, whose `receive_message` gets it. `patience`: see send_tensors."""
    with named(f"rank {to} is gone, or does not take what it is sent"):
        transfer.send_message(message, to, group, patience or _patience_with(to))


def receive_message(kind: type[T], group: dist.ProcessGroup, source: int, patience: timedelta = FOREVER) -> T:
    """What rank `source` sends. Raises SiteError if that is gone, or does not send within `patience`."""
    with named(_gone(source, patience)):
        return transfer.receive_message(kind, source, group, patience)


def send_tensors(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], to: int, patience: timedelta | None = None
) -> None:
    """Sends to rank `to` of the site, which calls `receive_tensors`. Raises SiteError.

    Waits for the other end for `patience`. None: for rank 0, as long as it lives, since it may have to wait for the
    swarm; for another rank, the group's timeout.
    """
    with named(f"rank {to} is gone, or does not take what it is sent"):
        transfer.send_tensors(tensors, to, group, patience or _patience_with(to))


def receive_tensors(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], source: int, patience: timedelta = FOREVER
) -> None:
    """Fills these tensors. Raises SiteError if rank `source` is gone, or does not send within `patience`."""
    with named(_gone(source, patience)):
        transfer.receive_tensors(tensors, source, group, patience)


def _patience_with(rank: int) -> timedelta | None:
    return None if rank else FOREVER


def _gone(rank: int, patience: timedelta) -> str:
    late = "" if patience == FOREVER else f", or sent nothing within {patience.total_seconds():g} s"
    return f"rank {rank} is gone{late}"


def sever(group: dist.ProcessGroup) -> None:
    """Ends all waits in this group with an error, in this process and the others; all later calls raise too.
    Without effect on a group that is severed already, or that this process has left.

    A thread inside of a gloo call cannot be interrupted, but gloo closes all connections of a group as soon as one wait
    in it times out. A wait for a process that is gone already gives another error, which closes nothing; so all ranks
    are tried.
    """
    try:
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    except (RuntimeError, ValueError, KeyError):
        return  # the group, or all of torch.distributed, has been taken apart here
    for rank in others:
        with suppress(RuntimeError, ValueError):  # the timeout that is wanted
            work = dist.irecv(torch.empty(1), src=rank, group=group, tag=1 << 20)  # nobody sends with this tag
            if work is not None:
                work.wait(timedelta(milliseconds=1))


@contextmanager
def named(what: str) -> Iterator[None]:
    """Errors of torch.distributed inside of the block become SiteErrors that begin with `what`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed, or a message is unreadable
        # gloo begins with the place in its source and ends with advice.
        reason = re.sub(r"^\[\S*\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
        raise SiteError(f"{what}: {reason:.300}") from error
