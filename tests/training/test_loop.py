from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swarmcli.errors import RecipeError, TrainingError
from swarmcli.training import EpochReport, LoopSettings, StepReport, TrainingLoop, build_task
from swarmcli.training.loop import MAX_BAD_STEPS

from .small_tasks import LineTask, SoloOptimizer, small


def make(
    task: LineTask, target: int = 8, steps: int = 1, epochs: int | None = 3, **callbacks: Any
) -> tuple[TrainingLoop, nn.Module, SoloOptimizer]:
    model = task.build_model()
    optimizer = SoloOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), target)
    settings = LoopSettings(stream_seed=1, accumulation_steps=steps, max_epochs=epochs)
    return TrainingLoop(task, model, optimizer, settings, **callbacks), model, optimizer


def test_it_trains_until_max_epochs() -> None:
    loop, _, optimizer = make(LineTask())
    result = loop.run(threading.Event())
    assert (result.reason, result.epoch, result.samples) == ("max_epochs", 3, 24)
    assert optimizer.batch_sizes == [4] * 6


def test_a_run_that_has_reached_its_end_computes_nothing() -> None:
    loop, _, optimizer = make(LineTask(), epochs=0)
    result = loop.run(threading.Event())
    assert (result.reason, result.samples, result.loss) == ("max_epochs", 0, None)
    assert optimizer.batch_sizes == []


def test_stopping_finishes_the_step_in_progress() -> None:
    stop = threading.Event()
    seen: list[StepReport] = []

    def on_step(report: StepReport) -> None:
        seen.append(report)
        if len(seen) == 2:
            stop.set()

    loop, _, optimizer = make(LineTask(), epochs=None, on_step=on_step)
    result = loop.run(stop)
    assert result.reason == "stopped" and optimizer.batch_sizes == [4, 4]


def test_stopped_before_it_began_it_computes_nothing() -> None:
    stop = threading.Event()
    stop.set()
    loop, _, optimizer = make(LineTask())
    assert loop.run(stop).reason == "stopped" and not optimizer.batch_sizes


def test_data_that_ends_ends_the_loop_without_half_a_step() -> None:
    loop, _, optimizer = make(LineTask(count=5), steps=2, epochs=None)
    result = loop.run(threading.Event())
    assert (result.reason, result.samples) == ("data ended", 16)
    assert optimizer.batch_sizes == [8, 8]


@pytest.mark.parametrize("steps", [1, 3])
def test_accumulated_micro_batches_equal_one_large_batch(steps: int) -> None:
    small_steps, model, _ = make(LineTask(size=4), target=12, steps=steps, epochs=4)
    small_steps.run(threading.Event())
    reference = LineTask().build_model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    stream = LineTask(size=4).batches(1)
    for _ in range(4):
        batches = [next(stream) for _ in range(3)]
        whole = {name: torch.cat([batch[name] for batch in batches]) for name in ("x", "y")}
        optimizer.zero_grad()
        LineTask().loss(reference, whole).backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_losses_are_told_before_the_step_that_may_end_their_epoch() -> None:
    told: list[tuple[str, int]] = []
    loop, _, optimizer = make(
        LineTask(),
        epochs=2,
        on_loss=lambda loss, samples: told.append(("loss", optimizer.local_epoch)),
        on_step=lambda report: told.append(("step", report.epoch)),
        on_epoch=lambda report: told.append(("epoch", report.epoch)),
    )
    loop.run(threading.Event())
    one_epoch = [("loss", 0), ("step", 0), ("loss", 0), ("step", 0), ("epoch", 0)]
    assert told == one_epoch + [(what, 1) for what, _ in one_epoch]


def test_an_epoch_s_report_is_the_mean_over_its_samples() -> None:
    steps: list[StepReport] = []
    epochs: list[EpochReport] = []
    loop, _, _ = make(LineTask(), target=12, epochs=2, on_step=steps.append, on_epoch=epochs.append)
    result = loop.run(threading.Event())
    assert [(report.epoch, report.samples) for report in epochs] == [(0, 12), (1, 12)]
    assert epochs[0].loss == pytest.approx(sum(step.loss for step in steps[:3]) / 3)
    assert result.loss == epochs[1].loss and epochs[1].loss < epochs[0].loss
    assert all(step.seconds >= 0 and step.waiting_seconds >= 0 for step in steps)


def test_a_loss_that_is_no_number_is_dropped_before_it_reaches_others() -> None:
    task = LineTask()
    loop, model, optimizer = make(task)
    task.spoiled = 2
    loop.run(threading.Event())
    assert optimizer.batch_sizes == [4] * 6
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_losses_that_stay_no_numbers_end_training_with_advice() -> None:
    task = LineTask()
    task.spoiled = 10**9
    loop, _, optimizer = make(task)
    with pytest.raises(TrainingError, match=rf"no number in {MAX_BAD_STEPS} steps in a row; lower optimizer"):
        loop.run(threading.Event())
    assert optimizer.batch_sizes == []


def test_single_bad_losses_do_not_add_up() -> None:
    task = LineTask()

    def spoil_next(report: StepReport) -> None:
        task.spoiled = 1

    loop, _, _ = make(task, target=4, epochs=2 * MAX_BAD_STEPS, on_step=spoil_next)
    assert loop.run(threading.Event()).epoch == 2 * MAX_BAD_STEPS


def test_errors_of_the_optimizer_and_the_data_go_to_the_caller(tmp_path: Path) -> None:
    loop, _, optimizer = make(LineTask())
    optimizer.step = lambda *, batch_size: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        loop.run(threading.Event())
    task = build_task(small(tmp_path, "datasets.0.path=gone"))
    model = task.build_model()
    solo = SoloOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 8)
    with pytest.raises(RecipeError, match="gone does not exist"):
        TrainingLoop(task, model, solo, LoopSettings(1)).run(threading.Event())


def test_a_language_model_learns_by_it(tmp_path: Path) -> None:
    task = build_task(small(tmp_path))
    model = task.build_model()
    losses: list[float | None] = []
    loop = TrainingLoop(
        task,
        model,
        SoloOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2), 8),
        LoopSettings(1, max_epochs=20),
        on_epoch=lambda report: losses.append(report.loss),
    )
    loop.run(threading.Event())
    first, last = losses[0], losses[-1]
    assert first is not None and last is not None and last < 0.5 * first


def test_dropout_is_the_same_for_the_same_peer(tmp_path: Path) -> None:
    def trained() -> list[torch.Tensor]:
        task = build_task(small(tmp_path, "base_model.resid_pdrop=0.5"))
        model = task.build_model()
        solo = SoloOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 8)
        TrainingLoop(task, model, solo, LoopSettings(3, max_epochs=2)).run(threading.Event())
        return list(model.parameters())

    first = trained()
    torch.manual_seed(99)
    assert all(map(torch.equal, first, trained()))
