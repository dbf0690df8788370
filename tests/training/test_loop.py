from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swarmcli.errors import RecipeError, TrainingError
from swarmcli.training import LoopSettings, TrainingLoop, build_task
from swarmcli.training.loop import ComputePace, MeanLoss
from swarmcli.training.task import Batch

from .small_tasks import LineTask, SoloOptimizer, small


def make(
    task: LineTask, target: int = 8, steps: int = 1, epochs: int | None = 3, **callbacks: Any
) -> tuple[TrainingLoop, nn.Module, SoloOptimizer]:
    model = task.build_model()
    optimizer = SoloOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), target)
    settings = LoopSettings(stream_seed=1, accumulation_steps=steps)
    return TrainingLoop(task, model, optimizer, settings, last_epoch=lambda: epochs, **callbacks), model, optimizer


def test_it_computes_nothing_when_it_is_stopped_before_or_the_run_has_reached_its_end() -> None:
    stop = threading.Event()
    stop.set()
    for event, epochs, reason in ((stop, 3, "stopped"), (threading.Event(), 0, "max_epochs")):
        loop, _, optimizer = make(LineTask(), epochs=epochs)
        result = loop.run(event)
        assert (result.reason, result.samples, result.loss) == (reason, 0, None) and optimizer.batch_sizes == []


def test_stopping_finishes_the_step_in_progress_and_data_that_end_make_no_half_of_one() -> None:
    stop = threading.Event()
    loop, _, optimizer = make(LineTask(), epochs=None, on_step=lambda: stop.set() if len(sizes) == 2 else None)
    sizes = optimizer.batch_sizes
    assert loop.run(stop).reason == "stopped" and sizes == [4, 4]
    loop, _, optimizer = make(LineTask(count=5), steps=2, epochs=None)
    result = loop.run(threading.Event())
    assert (result.reason, result.samples) == ("data ended", 16)
    assert optimizer.batch_sizes == [8, 8]


class WeighingLine(LineTask):
    """Its loss is a mean over the rows whose first feature is positive."""

    def weight(self, batch: Batch) -> float:
        return int((batch["x"][:, 0] > 0).sum())

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return super().loss(model, {name: tensor[batch["x"][:, 0] > 0] for name, tensor in batch.items()})


@pytest.mark.parametrize("steps", [1, 4])
def test_micro_batches_of_a_task_that_weighs_them_count_by_weight(steps: int) -> None:
    """Of the eight of an epoch some weigh nothing, and their loss, a mean over nothing, is never asked for."""
    noted = MeanLoss()
    loop, model, optimizer = make(WeighingLine(size=3), target=24, steps=steps, epochs=2, on_loss=noted.add)
    stream, plain = WeighingLine(size=3).batches(1), WeighingLine().build_model()
    batches = [next(stream) for _ in range(16)]
    weights = [WeighingLine().weight(batch) for batch in batches]
    assert weights[4:9] == [1, 0, 2, 3, 0]
    reference, mean = torch.optim.SGD(plain.parameters(), lr=0.1), MeanLoss()
    for part in (batches[:8], batches[8:]):
        reference.zero_grad()
        whole = {name: torch.cat([batch[name] for batch in part]) for name in ("x", "y")}
        loss = WeighingLine().loss(plain, whole)
        loss.backward()
        mean.add(loss.item(), WeighingLine().weight(whole))
        reference.step()
    assert loop.run(threading.Event()).samples == 48 and optimizer.batch_sizes == [3 * steps] * (16 // steps)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert noted.value == pytest.approx(mean.value, rel=1e-5)


def test_losses_are_told_before_the_step_that_may_end_their_epoch() -> None:
    told: list[tuple[str, int]] = []
    loop, _, optimizer = make(
        LineTask(),
        epochs=2,
        on_loss=lambda loss, samples: told.append(("loss", optimizer.local_epoch)),
        on_step=lambda: told.append(("step", optimizer.local_epoch)),
    )
    loop.run(threading.Event())
    one_epoch = [("loss", 0), ("step", 0), ("loss", 0), ("step", 1)]
    assert told == one_epoch + [(what, epoch + 1) for what, epoch in one_epoch]


def test_the_loss_of_a_run_is_the_mean_over_the_samples_of_its_last_epoch() -> None:
    losses: list[float] = []
    loop, _, _ = make(LineTask(), target=12, epochs=2, on_loss=lambda loss, samples: losses.append(loss))
    result = loop.run(threading.Event())
    assert result.loss == pytest.approx(sum(losses[3:]) / 3) and result.loss < sum(losses[:3]) / 3


def test_single_bad_losses_do_not_add_up_and_those_that_stay_end_training_with_advice() -> None:
    task = LineTask()
    loop, _, optimizer = make(task, target=4, epochs=2 * 20, on_step=lambda: setattr(task, "spoiled", 1))
    assert loop.run(threading.Event()).epoch == 2 * 20
    task.spoiled = 10**9
    loop, _, optimizer = make(task)
    with pytest.raises(TrainingError, match=r"no numbers in 20 steps in a row; lower optimizer"):
        loop.run(threading.Event())
    assert optimizer.batch_sizes == []


def test_errors_of_the_optimizer_and_the_data_go_to_the_caller(tmp_path: Path) -> None:
    loop, _, optimizer = make(LineTask())
    optimizer.step = lambda **_: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        loop.run(threading.Event())
    task = build_task(small(tmp_path, "datasets.0.path=gone"))
    model = task.build_model()
    solo = SoloOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 8)
    with pytest.raises(RecipeError, match=r"datasets\.0\.path=gone: datasets\.0: .*gone does not exist"):
        TrainingLoop(task, model, solo, LoopSettings(1)).run(threading.Event())


class Rests(ComputePace):
    """A pace that asks for a rest of so many looks behind each batch."""

    def __init__(self, looks: int) -> None:
        super().__init__(0.5)
        self.looks, self.left, self.begun = looks, 0, 0

    def begin(self) -> None:
        assert self.left == 0, "a batch began before the rest was over"
        self.begun += 1

    def end(self) -> None:
        self.left = self.looks

    @property
    def owed(self) -> float:
        self.left = max(0, self.left - 1)
        return 1e-6 if self.left else 0.0


def test_it_rests_behind_each_batch_also_within_a_step() -> None:
    loop, _, optimizer = make(LineTask(), steps=2, pace=(pace := Rests(4)))
    assert loop.run(threading.Event()).samples == 24
    assert pace.begun == 6 and optimizer.batch_sizes == [8] * 3


def test_a_rest_ends_for_a_round_and_for_whoever_stops_or_pauses_it() -> None:
    pace = Rests(10**9)
    loop, _, optimizer = make(LineTask(), pace=pace)
    waits, stop = iter([False, True, False, True]), threading.Event()

    def take_part(*, batch_size: int, weight: float | None = None) -> None:
        optimizer.batch_sizes.append(batch_size)
        if optimizer.batch_sizes.count(0) == 2:
            stop.set()

    optimizer.step = take_part  # type: ignore[method-assign]
    type(optimizer).is_averaging = property(lambda self: next(waits))  # type: ignore[assignment]
    try:
        assert loop.run(stop).reason == "stopped"
    finally:
        type(optimizer).is_averaging = False  # type: ignore[assignment]
    assert optimizer.batch_sizes == [4, 0, 0]
    pace.interrupted = lambda: True
    loop._rest(threading.Event())  # returns


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def compute(pace: ComputePace, clock: Clock, seconds: float) -> float:
    """A batch, and the rest behind it."""
    pace.begin()
    clock.now += seconds
    pace.end()
    rested = pace.owed
    clock.now += rested
    return rested


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> ComputePace:
    return ComputePace(0.5, clock=clock)


@pytest.mark.parametrize(("share", "batch"), [(0.1, 0.01), (0.1, 0.4), (0.9, 0.1)])
def test_a_share_of_the_time_is_kept_over_ten_seconds(share: float, batch: float, clock: Clock) -> None:
    pace, began, computed = ComputePace(share, clock=clock), clock.now, 0.0
    while clock.now < began + 10:
        compute(pace, clock, batch)
        computed += batch
    assert computed / (clock.now - began) == pytest.approx(share, rel=0.1)


def test_it_rests_after_each_batch_not_in_bursts_and_makes_up_for_long_rests(pace: ComputePace, clock: Clock) -> None:
    compute(pace, clock, 0.3)
    assert [compute(pace, clock, 0.1) for _ in range(20)] == pytest.approx([0.1] * 20)
    for _ in range(50):
        compute(pace, clock, 0.1)
        clock.now += 0.02  # the system wakes the thread late
    assert compute(pace, clock, 0.1) < 0.1


def test_waiting_for_others_counts_as_rest_and_is_not_saved_up(pace: ComputePace, clock: Clock) -> None:
    pace.begin()
    clock.now += 2.0
    pace.end()
    clock.now += 1.5  # a round
    assert pace.owed == pytest.approx(0.5)
    clock.now += 3600.0
    assert pace.owed == 0.0
    assert compute(pace, clock, 0.5 + 0.2) == pytest.approx(0.2)


def test_another_share_counts_from_now_on_also_in_the_middle_of_a_rest(pace: ComputePace, clock: Clock) -> None:
    pace.share = 0.1
    pace.begin()
    clock.now += 1.0
    pace.end()
    for share, owed in ((0.1, 9.0), (0.5, 1.0), (1.0, 0.0)):
        pace.share = share
        assert pace.owed == pytest.approx(owed, rel=0.1)
    assert compute(pace, clock, 5.0) == 0.0
