"""Checks that run in N ranks of a torch.distributed world of gloo, which are threads of the process of the test.

    def sums(start: float) -> torch.Tensor:              # runs in every rank
        total = torch.tensor(start + dist.get_rank())
        dist.all_reduce(total)
        return total

    def test_sums() -> None:
        assert [float(each) for each in in_threads(2, sums, 1.0)] == [3.0, 3.0]

    @ranks(2)                                             # where nobody looks at what is returned
    def test_all_meet() -> None:
        dist.barrier()

Each rank has what torch.distributed keeps for a process, and so have the threads that it starts; what they send goes
through gloo, as between processes. That takes a twentieth of a second, so these tests are in `make test`. Whatever else
a process has only once they share: random numbers (see `DRAWING`), the environment, what a check replaces in a module.
What that disturbs, and what kills a rank, needs processes (tests/sharding/processes.py).
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from swarmcli.sites.links import sever
from tests.sharding.processes import RankFailed

SECONDS = 60.0  # for a check
GRACE_SECONDS = 5.0  # for the others to tell what they saw of a rank that failed
DRAWING = threading.Lock()  # from torch.manual_seed on until all is drawn


def in_threads(size: int, check: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `check(*arguments)` returned in each rank, by rank. Raises RankFailed if any did not return."""
    store, values, failures = dist.HashStore(), [None] * size, list[str]()

    def live(rank: int) -> None:
        try:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS))
            values[rank] = check(*arguments)
            dist.barrier()
        except (Exception, pytest.fail.Exception):  # the latter is what `pytest.raises` raises
            failures.append(f"rank {rank}: {traceback.format_exc()}")
            for group in list(c10d._world.pg_map):
                sever(group)  # the others wait for this one no longer
        finally:
            with suppress(Exception):
                dist.destroy_process_group()

    with pytest.MonkeyPatch.context() as patch:
        _tell_apart(patch)
        ranks = [_Rank(target=live, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
        for each in ranks:
            each.start()
        deadline = monotonic() + SECONDS
        while any(each.is_alive() for each in ranks) and monotonic() < deadline:
            next(each for each in ranks if each.is_alive()).join(0.05)
            if failures:
                deadline = min(deadline, monotonic() + GRACE_SECONDS)
    stuck = [f"{each.name} said nothing in time" for each in ranks if each.is_alive()]
    if failures or stuck:
        raise RankFailed("\n".join(failures + stuck))
    return values


def ranks(size: int) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a check that needs no look at what it returns."""

    def decorate(check: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(check)
        def test(**given: Any) -> None:
            in_threads(size, functools.partial(check, **given))

        return test

    return decorate


class _Place(c10d._World):
    """What torch.distributed keeps in variables of its module, of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"):
            self.__dict__[f"_own_{name}"] = {}

    pg_map = property(lambda self: self._own_pg_map)  # type: ignore[assignment]
    pg_names = property(lambda self: self._own_pg_names)  # type: ignore[assignment]
    pg_group_ranks = property(lambda self: self._own_pg_group_ranks)  # type: ignore[assignment]
    pg_backend_config = property(lambda self: self._own_pg_backend_config)  # type: ignore[assignment]
    tags_to_pg = property(lambda self: self._own_tags_to_pg)  # type: ignore[assignment]
    pg_to_tag = property(lambda self: self._own_pg_to_tag)  # type: ignore[assignment]

    @property
    def group_count(self) -> int:
        return self._count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._count = value


class _Rank(threading.Thread):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.place = _Place()


class _Here:
    """Stands for the place of the rank whose thread asks."""

    def __init__(self, elsewhere: Any) -> None:
        self.__dict__["_elsewhere"] = elsewhere

    def _place(self) -> Any:
        return getattr(threading.current_thread(), "place", self._elsewhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._place(), name, value)


def _tell_apart(patch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_in_the_same_place(thread: threading.Thread) -> None:
        place = getattr(threading.current_thread(), "place", None)
        if place is not None and not hasattr(thread, "place"):
            thread.place = place  # type: ignore[attr-defined]
        start(thread)

    patch.setattr(threading.Thread, "start", start_in_the_same_place)
    patch.setattr(c10d, "_world", _Here(c10d._world))
    # A list of the process, by names that its ranks have in common; only compiled collectives look into it.
    for name in ("_register_process_group", "_unregister_process_group"):
        patch.setattr(c10d, name, lambda *arguments: None)
