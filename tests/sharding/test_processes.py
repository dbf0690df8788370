"""The harness itself: what goes through it, and what a rank that fails looks like in the test."""

from __future__ import annotations

import os
import signal
import sys

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.sharding.processes import RankFailed, World, Worlds

pytestmark = pytest.mark.e2e


def gather(start: float) -> dict[str, object]:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "total": total, "pid": os.getpid(), "draw": torch.rand(2)}


def echo(*values: object) -> list[object]:
    return list(values)


def fail_in_one() -> None:
    if dist.get_rank() == 1:
        print("the last words", file=sys.stderr)
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def expect_in_vain() -> None:
    with pytest.raises(ValueError):
        pass


def die_in_one() -> int:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def hang_in_one() -> None:
    if dist.get_rank() == 1:
        signal.pause()


def form(backend: str) -> int:
    dist.init_process_group(backend)
    total = torch.ones(())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)


def test_every_rank_runs_the_check_and_the_next_one_finds_it_warm(worlds: Worlds) -> None:
    first, second = worlds(2).run(gather, 1.0), worlds(2).run(gather, 2.0)
    assert [float(each["total"]) for each in first] == [3.0, 3.0]
    assert [float(each["total"]) for each in second] == [5.0, 5.0]
    assert [each["pid"] for each in first] == [each["pid"] for each in second]
    assert all(torch.equal(each["draw"], first[0]["draw"]) for each in first + second)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
)
def test_tensors_of_any_kind_go_there_and_back(worlds: Worlds, dtype: torch.dtype) -> None:
    values = [torch.arange(6).reshape(2, 3).to(dtype), torch.tensor(1).to(dtype), torch.empty(0, 3, dtype=dtype)]
    for rank in worlds(2).run(echo, *values):
        assert [each.dtype for each in rank] == [dtype] * 3
        assert [each.shape for each in rank] == [each.shape for each in values]
        assert all(torch.equal(a, b) for a, b in zip(rank, values, strict=True))


def test_what_is_not_plain_is_refused(worlds: Worlds) -> None:
    with pytest.raises(TypeError, match="object"):
        worlds(2).run(echo, object())


def test_a_failed_rank_is_shown_and_the_next_check_has_a_new_world(worlds: Worlds) -> None:
    before = worlds(2).run(gather, 0.0)
    with pytest.raises(RankFailed, match=r"rank 1: Traceback(.|\n)*has had enough(.|\n)*the last words"):
        worlds(2).run(fail_in_one)
    assert not any(psutil.pid_exists(each["pid"]) for each in before)
    assert [float(each["total"]) for each in worlds(2).run(gather, 1.0)] == [3.0, 3.0]


def test_an_error_that_does_not_come_is_a_failure(worlds: Worlds) -> None:
    with pytest.raises(RankFailed, match=r"rank 0: Traceback(.|\n)*DID NOT RAISE(.|\n)*rank 1: Traceback"):
        worlds(2).run(expect_in_vain)


def test_of_a_dead_rank_the_others_can_tell(worlds: Worlds) -> None:
    survivor, dead = worlds(2).outcomes(die_in_one)
    assert "ended with -9" in str(dead.error)
    assert survivor.error is not None  # in the barrier after the check


def test_a_rank_that_hangs_is_ended_with_its_stack() -> None:
    hanging, stuck = World(2, seconds=5.0).outcomes(hang_in_one)  # in which a busy machine comes to the check
    assert hanging.error is not None
    assert "hang_in_one" in str(stuck.error)


def test_a_check_may_form_the_group_itself_again_and_again(worlds: Worlds) -> None:
    for _ in range(2):
        assert worlds(4, grouped=False).run(form, "gloo") == [4, 4, 4, 4]


def test_nothing_is_left_of_a_closed_world() -> None:
    world = World(2)
    pids = [each["pid"] for each in world.run(gather, 0.0)]
    world.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
