"""StepControl: used from the loop and from other threads."""

from __future__ import annotations

import asyncio
import math
import re
from concurrent.futures import CancelledError
from typing import Any

import pytest

from swarmcli.averaging import RoundResult
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.step_control import AveragingStage, RoundRequest, StepControl
from swarmcli.clock import Clock
from swarmcli.errors import RoundFailed
from swarmcli.network.identity import Identity
from tests.simulation import in_real_time

PEER = Identity.from_seed(1).peer_id
GROUP = Group.form(b"", [Member(PEER)], [1.0], bytes(16))
RESULT = RoundResult(round_id=GROUP.group_id, group=GROUP, gathered={PEER: "note"}, weights={PEER: 1.0})


def make(**request: Any) -> StepControl:
    return StepControl(RoundRequest(**request), Clock())


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"weight": -1.0}, "weight"),
        ({"weight": math.nan}, "weight"),
        ({"weight": 1e-20}, "weight"),
        ({"timeout": 0.0}, "timeout"),
        ({"target": -5.0}, "target"),
        ({"target": math.inf}, "target"),
        ({"scheduled_time": math.nan}, "scheduled_time"),
        ({"tag": bytes(300)}, "tag"),
        ({"terms": {"k": "v" * 300}}, "fingerprint"),
    ],
)
def test_requests_that_make_no_sense(request_: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RoundRequest(**request_)


def test_a_result_is_a_mapping_of_what_was_gathered() -> None:
    assert dict(RESULT) == {PEER: "note"} and len(RESULT) == 1 and RESULT[PEER] == "note"
    assert re.fullmatch("<RoundResult of . contributors, 0 left out: {'.{8,14}': 'note'}>", repr(RESULT))


@in_real_time
async def test_the_life_of_a_control() -> None:
    control = make(require_trigger=True, timeout=10.0)
    assert control.stage is AveragingStage.IDLE and not control.triggered and not control.done()
    assert control.deadline - Clock().now() == pytest.approx(10.0, abs=0.5)
    control.mark_begun(GROUP)
    assert await control.begun is GROUP is control.group
    control.weight = 3.0
    waiting = asyncio.create_task(control.wait_for_trigger())
    control.allow_allreduce()
    assert await waiting == 3.0
    assert control.triggered and control.began_allreduce
    with pytest.raises(RuntimeError, match="weight"):
        control.weight = 1.0
    control.finish(RESULT)
    assert await control is RESULT and control.result(0) is RESULT and control.exception(0) is None
    assert control.stage is AveragingStage.FINISHED and not control.cancel()
    control.finish(None)  # the first end counts
    assert not control.cancelled()


@in_real_time
async def test_an_error_and_a_cancellation() -> None:
    failed, dropped = make(), make()
    failed.finish(RoundFailed("because"))
    with pytest.raises(RoundFailed, match="because"):
        await failed
    dropped.finish(None)
    assert dropped.cancelled() and isinstance(await dropped.outcome(), RoundFailed)
    for each in (failed, dropped):
        with pytest.raises(RoundFailed):
            await each.begun
    with pytest.raises(CancelledError):
        dropped.result(0)
    with pytest.raises(asyncio.CancelledError):
        await dropped


@in_real_time
async def test_whoever_stops_waiting_does_not_stop_the_round() -> None:
    control = make()
    for wait in (control, control.begun):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await wait
    assert not control.done() and not control.begun.done()
    control.mark_begun(GROUP)
    control.finish(RESULT)
    assert await control is RESULT


@in_real_time
async def test_reports_grow_and_wake_the_listener() -> None:
    control, heard = make(target=10.0), []
    control.report(1.0)
    control.listener = lambda: heard.append(control.progress)
    for progress in (2.0, 1.5, 2.0, 3.0):
        control.report(progress)
    assert heard == [2.0, 3.0]
    with pytest.raises(ValueError, match="progress"):
        control.report(math.nan)
    control.scheduled_time = 5.0
    assert control.scheduled_time == 5.0 and len(heard) == 3


@in_real_time
async def test_cancel_cancels_the_task_once() -> None:
    control = make()
    task = asyncio.create_task(asyncio.sleep(3600))
    control.task = task
    assert control.cancel()
    await asyncio.wait([task])
    control.finish(None)
    assert task.cancelled() and not control.cancel()
