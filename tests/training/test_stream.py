"""What a peer remembers of its stream of data, and what it makes of a file that is of no use."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmcli.errors import DataError
from swarmcli.training import LoopSettings, TrainingLoop, build_task
from swarmcli.training.stream import PrefetchedStream, RememberedStream

from .small_tasks import LineTask, SoloOptimizer, small


def take(made: RememberedStream, count: int) -> list[list[float]]:
    batches = [made.next() for _ in range(count)]
    return [batch["x"].flatten().tolist() for batch in batches if batch is not None]


@pytest.mark.parametrize("how", ["torn", "changed", "empty", "no JSON", "a directory", "deep"])
def test_a_file_that_is_no_use_is_ignored_with_a_note(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "stream.json"
    first = RememberedStream(LineTask(), 1, file)
    take(first, 3)
    first.remember()
    content = file.read_text()
    changed = {"torn": content[: len(content) // 2], "changed": content.replace("3}", "2}")}
    file.unlink()
    if how == "a directory":
        file.mkdir()
    else:
        file.write_text((changed | {"empty": "", "no JSON": "\0\xff", "deep": "[" * 100_000})[how])
    again = RememberedStream(LineTask(), 1, file)
    assert "begins at its beginning" in caplog.text and str(file) in caplog.text
    assert take(again, 2) == take(RememberedStream(LineTask(), 1), 2)
    assert again.dropout_seed != first.dropout_seed


def test_a_file_of_other_data_is_ignored_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "stream.json"
    recipe = small(tmp_path)
    first = RememberedStream(build_task(recipe), 1, file)
    first.next()
    first.remember()
    RememberedStream(build_task(recipe), 1, file)
    assert not caplog.records
    (tmp_path / "texts" / "more").write_text("d" * 1000)
    with caplog.at_level(logging.WARNING):
        again = RememberedStream(build_task(recipe), 1, file)
    assert "of no use: it is of other data, or of another recipe" in caplog.text
    assert again.next() is not None


def test_a_file_is_for_the_peer_that_wrote_it(tmp_path: Path) -> None:
    first = RememberedStream(LineTask(), 1, tmp_path / "stream.json")
    take(first, 3)
    first.remember()
    other = RememberedStream(LineTask(), 2, tmp_path / "stream.json")
    assert take(other, 2) == take(RememberedStream(LineTask(), 2), 2)


def test_a_full_disk_costs_the_memory_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    made = RememberedStream(LineTask(), 1, tmp_path / "file" / "stream.json")
    made.remember()
    assert take(made, 1) and caplog.text.count("was not written") == 1  # and not after every epoch


class Watched(LineTask):
    """Notes what is computed, and with which random numbers."""

    def __init__(self) -> None:
        super().__init__(size=4)
        self.seen: list[list[float]] = []
        self.dropout: list[float] = []

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.seen.append(batch["x"].flatten().tolist())
        self.dropout.append(torch.rand(1).item())
        return super().loss(model, batch)


def run(file: Path, epochs: int, *, killed: bool = False) -> Watched:
    """A process that trains so many epochs of two batches; one that is killed is so in the middle of the last one."""
    task = Watched()
    model = task.build_model()
    optimizer = SoloOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 8)
    saved = [b""]

    def on_step() -> None:
        if len(task.seen) == 2 * epochs - 1:
            saved[0] = file.read_bytes()

    settings = LoopSettings(stream_seed=1, stream_file=file)
    TrainingLoop(task, model, optimizer, settings, on_step=on_step, last_epoch=lambda: epochs).run(threading.Event())
    if killed:
        file.write_bytes(saved[0])
    return task


def test_a_loop_that_is_started_again_goes_on_with_new_data_and_dropout_and_a_killed_one_from_the_last_epoch(
    tmp_path: Path,
) -> None:
    file = tmp_path / "stream.json"
    first, second, killed, last = run(file, 3), run(file, 3), run(file, 3, killed=True), run(file, 3)
    assert not [row for row in second.seen if row in first.seen]
    assert not set(first.dropout) & set(second.dropout)
    assert last.seen[:2] == killed.seen[4:]  # of the epoch in which it was killed
    assert not [row for row in last.seen[2:] if row in killed.seen]


class Counting:
    """A stream of the numbers from where it stands, up to an end or an error."""

    def __init__(self, begin: int = 0, end: int = 1 << 30, error: Exception | None = None) -> None:
        self.made, self._end, self._error = begin, end, error

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.made >= self._end:
            raise self._error or StopIteration
        self.made += 1
        return {"n": torch.tensor([self.made])}

    def position(self) -> dict[str, int]:
        return {"n": self.made}


def test_batches_made_ahead_are_the_same_and_the_position_is_behind_the_last_that_was_taken() -> None:
    stream = PrefetchedStream(Counting(), 3)
    assert stream.position() == {"n": 0}
    for number in range(1, 50):
        assert next(stream)["n"].item() == number and stream.position() == {"n": number}
    stream.close()


def test_no_more_batches_are_made_ahead_than_asked_for() -> None:
    source = Counting()
    stream = PrefetchedStream(source, 3)
    for number in range(20):
        next(stream)
        assert source.made <= number + 1 + 3
    stream.close()
    assert source.made <= 23


@pytest.mark.parametrize(("error", "raised"), [(None, StopIteration), (DataError("gone"), DataError)])
def test_the_end_and_errors_come_when_their_batch_is_wanted_and_stay(error: Exception | None, raised: type) -> None:
    stream = PrefetchedStream(Counting(end=2, error=error), 5)
    assert [next(stream)["n"].item() for _ in range(2)] == [1, 2]
    for _ in range(2):
        with pytest.raises(raised):
            next(stream)
    assert stream.position() == {"n": 2}
    stream.close()
