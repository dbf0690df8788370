"""How the processes of a site find each other: on one machine at a file, else at a store of torchrun's agents.

A file is new for each life of a site, and the file system says who may open it. torchrun's agents keep one store
through all restarts of their processes, which find there what earlier lives have left, and the agents of several
machines count restarts differently. So each life begins with a new name: rank 0 writes it down, every other rank writes
a random word below it, and rank 0 repeats the words. No process of an earlier life can have repeated a word of this
one.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from swarmcli.errors import SiteError

CURRENT = "swarm-site/current"  # the name of the life that rank 0 has begun last


def meet_at_file(path: Path, seconds: float) -> None:
    """Makes the torch.distributed world of the processes of this machine that the environment names. Raises
    RuntimeError if some do not come in time."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(path), size), rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )


def meet_at_agents_store(seconds: float) -> None:
    """Makes the torch.distributed world of the processes that the environment names, at the store of torch's agents,
    which may outlive these processes. Raises SiteError if some do not come in time, RuntimeError if the store cannot be
    reached, or torch.distributed cannot connect to another process."""
    given, timeout = os.environ, timedelta(seconds=seconds)
    rank, size = int(given["RANK"]), int(given["WORLD_SIZE"])
    store = dist.TCPStore(given["MASTER_ADDR"], int(given["MASTER_PORT"]), is_master=False, timeout=timeout)
    name = agree_on_name(store, rank, size, seconds)
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size, timeout=timeout)


def agree_on_name(store: dist.Store, rank: int, size: int, seconds: float) -> str:
    """A prefix for keys that no process has used before, the same for all ranks. Raises SiteError."""
    deadline = time.monotonic() + seconds
    return _invite(store, size, deadline) if rank == 0 else _answer(store, rank, deadline)


def _invite(store: dist.Store, size: int, deadline: float) -> str:
    name = f"swarm-site/{secrets.token_hex(8)}"
    store.set(CURRENT, name)
    missing = set(range(1, size))

    def welcome() -> bool:
        for rank in sorted(missing):
            if (word := _read(store, f"{name}/hello/{rank}")) is not None:
                store.set(f"{name}/welcome/{rank}", word)
                missing.discard(rank)
        return not missing

    if not _wait_until(welcome, deadline):
        raise SiteError(f"rank {', '.join(map(str, sorted(missing)))} did not come to the other processes of this site")
    return name


def _answer(store: dist.Store, rank: int, deadline: float) -> str:
    word, name = secrets.token_hex(8), ""

    def welcomed() -> bool:
        nonlocal name
        current = _read(store, CURRENT)
        if current is not None and current != name:
            name = current
            store.set(f"{name}/hello/{rank}", word)
        return bool(name) and _read(store, f"{name}/welcome/{rank}") == word

    if not _wait_until(welcomed, deadline):
        raise SiteError(f"rank 0 did not come to the other processes of this site, among them rank {rank}")
    return name


def _read(store: dist.Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _wait_until(done: Callable[[], bool], deadline: float) -> bool:
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)
    return True
