"""Saves checkpoints in child processes that are killed at every step of it, or whose disk is full from there on.

    python -m tests.training.test_killed_saves DIRECTORY

A step is whatever changes the disk: a file that is made, a write, an fsync, a rename, a link, a removal. The children
are forked, so torch is imported once; in each of them Python's functions for these steps are replaced by some that
count. After each child the parent looks at what is left. Prints how often each kind of step was the last.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swarmcli.checkpoints.directory import CheckpointDirectory, Keep, best_epochs, loss_of
from swarmcli.checkpoints.layout import MANIFEST, checkpoints_below, epoch_of, find_checkpoint
from swarmcli.checkpoints.looking import verify
from swarmcli.training import CheckpointStore, load_checkpoint

KEEP = Keep(2, 0, 1)
TAKE_ROOM = ("open", "write", "fsync", "rename", "replace", "mkdir", "symlink")


class Steps:
    """Counts, and does what was asked for at the step of a number: dies in it, or finds the disk full from it on."""

    def __init__(self, last: int, full: bool) -> None:
        self.last, self.full = last, full
        self.count = 0

    def take(self, kind: str, half: Callable[[], object] = lambda: None) -> None:
        self.count += 1
        if self.count == self.last:
            half()
            sys.stdout.write(f"{kind} ")
            sys.stdout.flush()
            if not self.full:
                os.kill(os.getpid(), signal.SIGKILL)
        if self.full and self.count >= self.last and kind in TAKE_ROOM:
            raise OSError(errno.ENOSPC, "No space left on device")

    def install(self) -> None:
        for name in ("fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "symlink"):
            setattr(os, name, self._counted(name, getattr(os, name)))
        shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]
        builtins.open = io.open = self._open  # type: ignore[assignment]

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*what: Any, **options: Any) -> Any:
            self.take(name)
            return real(*what, **options)

        return counted

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *text: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+"):
            return OPEN(file, mode, buffering, *text, **options)
        self.take("open")
        buffered = io.BufferedWriter(CountedFile(file, mode.replace("b", "").replace("t", ""), self))
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *text, **options)


OPEN = io.open


class CountedFile(io.FileIO):
    def __init__(self, file: Any, mode: str, steps: Steps) -> None:
        super().__init__(file, mode)
        self._steps = steps

    def write(self, data: Any) -> int:
        content = bytes(data)
        self._steps.take("write", lambda: io.FileIO.write(self, content[: len(content) // 2]))
        written = super().write(content)
        assert written is not None
        return written


def describe(directory: Path, epoch: int, samples: int | None) -> None:
    (directory / "README.md").write_text(f"epoch {epoch}")


def save(directory: Path, epoch: int, loss: float | None = None) -> None:
    torch.manual_seed(epoch)
    model = nn.Linear(64, 64)
    store = CheckpointStore(directory, "run", keep=KEEP, describe=describe)
    place = store.write(model, {"state": {0: {"sum": torch.randn(4)}}, "param_groups": []}, epoch)
    if place is not None and loss is not None:
        store.remember_loss(place, loss, 8)


# What is there before, and what the child saves.
BEFORE: dict[str, list[tuple[int, float | None]]] = {
    "next": [(1, 3.0), (2, 2.0)],
    "same": [(3, None)],
    "set-back": [(3, 1.0), (4, 2.0)],
}


def check(directory: Path, before: int, *, mended: bool) -> None:
    """Raises AssertionError unless whoever looks at the directory now finds what it should."""
    found = checkpoints_below(directory)
    for path in found:
        assert verify(path) == "", verify(path)
        load_checkpoint(path, "run")
    newest = find_checkpoint(directory)
    assert epoch_of(newest) >= before, newest
    latest, best = directory / "latest", directory / "best"
    for link in (latest, best):
        assert not link.is_symlink() or (link / MANIFEST).is_file(), f"{link.name} names nothing"
        assert not link.is_symlink() or load_checkpoint(find_checkpoint(link)), link
    assert not best.is_symlink() or loss_of(best) is not None
    if mended:
        losses = {epoch_of(path): loss_of(path) for path in found}
        lowest = best_epochs(losses, 1)
        assert latest.is_symlink() and epoch_of(latest.readlink()) in (before, 3)
        assert epoch_of(latest.resolve()) == max((3, before) if 3 in losses else (before,)) or before > 3
        assert (epoch_of(best.readlink()) if best.is_symlink() else None) == (lowest[0] if lowest else None)
        left = [path.name for path in directory.iterdir() if path.name.startswith(".") or path.suffix == ".replaced"]
        assert not left, left


def main(directory: Path, scenario: str, full: bool) -> None:
    ready = directory / "ready"
    for epoch, loss in BEFORE[scenario]:
        save(ready, epoch, loss)
    before = max(epoch for epoch, _ in BEFORE[scenario])
    kinds: Counter[str] = Counter()
    for last in range(1, 1000):
        place = directory / "now"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(ready, place, symlinks=True)
        come, go = os.pipe()
        child = os.fork()
        if not child:
            _save_in_child(place, scenario, Steps(last, full), go)
        os.close(go)
        with os.fdopen(come) as said:
            kind = said.read().strip()
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            raise SystemExit(f"{scenario}: step {last}, {kind}: the child failed")
        try:
            check(place, before, mended=False)
            CheckpointDirectory(place, KEEP).mend()
            check(place, before, mended=True)
        except Exception as error:
            traceback.print_exc()
            left = sorted(path.name for path in place.iterdir())
            raise SystemExit(f"{scenario}: step {last}, {kind}: {error}; {left}") from error
        if not kind:
            print(json.dumps({"scenario": scenario, "full": full, "last": kinds}))
            return
        kinds[kind] += 1


def _save_in_child(place: Path, scenario: str, steps: Steps, said: int) -> None:
    try:
        os.dup2(said, 1)
        steps.install()
        save(place, 3, 0.5)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.mark.e2e
@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked, so that torch is imported once")
def test_whatever_step_of_a_save_is_the_last_a_whole_newest_checkpoint_is_there(tmp_path: Path) -> None:
    memory = Path("/dev/shm")  # where an fsync costs nothing; which disk it is makes no difference to the steps
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as place:
        command = [sys.executable, "-m", "tests.training.test_killed_saves", place]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [each["scenario"] for each in told[::2]] == list(BEFORE)
    for each in told:
        last = each["last"]
        assert last["write"] >= 6 and last["fsync"] >= 12 and last["replace"] >= 5, each
        assert last["rename"] >= (3 if each["scenario"] in ("same", "set-back") else 2), each


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.Adam(nn.Linear(1, 1).parameters()).step()  # imports much, once for all children
    for name in BEFORE:
        for disk_is_full in (False, True):
            main(Path(sys.argv[1]) / f"{name}-{disk_is_full}", name, disk_is_full)
