"""Site: the processes that are one peer together, and the group in which they meet."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist

from swarmcli.errors import SiteError
from swarmcli.sites.links import named, receive_message, send_message, sever
from swarmcli.sites.meeting import meet_at_agents_store, meet_at_file

T = TypeVar("T")


class Site:
    """One process's place in its site: a torch.distributed world whose rank 0 is the swarm's peer.

    `group` spans the whole world, so a group rank is a global rank. It uses gloo and, if every process has a CUDA
    device of its own, NCCL for tensors there. One thread of a process at a time uses it. A bounded wait in it that
    takes longer than `timeout` seconds breaks the group for everyone: a site that has lost one of its processes ends as
    a whole, with errors in all others, and is started anew from its last state. (A collective of NCCL that waits for a
    lost process ends with this process, by NCCL's own watchdog.)

    `carrier`: where tensors have to lie to be summed over the ranks: this process's device, or host memory.
    """

    forming: ClassVar = timedelta(minutes=5)  # until all have started and found each other

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        group: dist.ProcessGroup,
        timeout: float,
        device: torch.device,
        owns_world: bool,
    ) -> None:
        """Called by `form`. `owns_world`: the world was made for this site and ends with it."""
        self.rank, self.size = rank, size
        self.group = group
        self.timeout = timedelta(seconds=timeout)
        self.device = device
        self.carrier = device if "nccl" in dist.get_backend_config(group) else torch.device("cpu")
        self._owns_world = owns_world
        self._closed = False

    @classmethod
    def form(
        cls,
        *,
        timeout: float = 60.0,
        device: torch.device | None = None,
        store: Path | None = None,
    ) -> Site:
        """Meets the other processes that the environment names (RANK, WORLD_SIZE, torchrun's variables), or takes the
        world that exists already.

        All of them call this. `timeout`: seconds that one process waits for another that is not itself waiting for the
        swarm. `device`: where this process computes. `store`: a file at which processes of one machine meet, new for
        each site (None: at the store that the environment names). Raises SiteError if they do not find each other
        within `forming`.
        """
        if timeout <= 0:
            raise ValueError(f"timeout={timeout!r}: expected a positive number of seconds")
        owns_world = not dist.is_initialized()
        with named("the processes of this site did not come together"):
            if owns_world and store is not None:
                meet_at_file(store, cls.forming.total_seconds())
            elif owns_world and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                meet_at_agents_store(cls.forming.total_seconds())
            elif owns_world:
                dist.init_process_group("gloo", timeout=cls.forming)
            backend = "cpu:gloo,cuda:nccl" if _all_have_own(device) else "gloo"
            group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout))
        if group is None:
            raise SiteError("torch.distributed gave this process no group")
        return cls(
            dist.get_rank(),
            dist.get_world_size(),
            group=group,
            timeout=timeout,
            device=device or torch.device("cpu"),
            owns_world=owns_world,
        )

    @property
    def others(self) -> range:
        """The ranks but 0."""
        return range(1, self.size)

    def share(self, kind: type[T], value: T) -> T:
        """Rank 0's value, at every rank. All main threads call it; they wait for rank 0 as long as it lives.

        Raises SiteError; at rank 0 also if a rank does not call it within `forming`.
        """
        if self.rank:
            return receive_message(kind, self.group, 0)
        for rank in self.others:
            send_message(self.group, value, rank, self.forming)
        return value

    def meet(self, patience: timedelta | None = None) -> None:
        """Returns when all main threads have called it. Raises SiteError if a rank takes longer; None: `forming`."""
        if self.rank:
            send_message(self.group, None, 0)
        else:
            for rank in self.others:
                receive_message(type(None), self.group, rank, patience or self.forming)
        self.share(type(None), None)

    def any(self, mine: bool) -> bool:
        """Whether `mine` is true at any rank. All main threads call it. Raises SiteError."""
        found = torch.tensor(int(mine))
        with named("the processes of this site did not agree"):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def break_off(self) -> None:
        """Every thread of the site that waits for another process gets an error now. For any thread; idempotent."""
        if self.size > 1 and not self._closed:
            sever(self.group)

    def close(self, *, broken: bool = False) -> None:
        """Leaves the group; no thread may be in it. Idempotent.

        `broken`: the site ends before its time, and ranks that wait for this process get an error at once.
        """
        if broken:
            self.break_off()
        if not self._closed:
            self._closed = True
            dist.destroy_process_group(None if self._owns_world else self.group)

    def __enter__(self) -> Site:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.close(broken=kind is not None)

    def __repr__(self) -> str:
        return f"<rank {self.rank} of a site of {self.size}>"


def _all_have_own(device: torch.device | None) -> bool:
    """Whether each process computes on a CUDA device of its own, which NCCL needs."""
    own = (
        device is not None
        and device.type == "cuda"
        and dist.is_nccl_available()
        and int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) <= torch.cuda.device_count()
    )
    everyone = torch.tensor(int(own))
    dist.all_reduce(everyone, op=dist.ReduceOp.MIN)
    return bool(everyone)
