"""The directory of a peer's checkpoints: puts one in, keeps the links beside them, and removes those that need not
stay.

Each step leaves the directory usable if the process is killed in it. A checkpoint that has its name is whole, and a
link names one that exists. Whatever else a killed process leaves begins with a dot, and is removed when the next
checkpoint is written.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from swarmcli.checkpoints.layout import BEST, EVALUATION, LATEST, MANIFEST, NAME, REPLACED, epoch_of, read_manifest
from swarmcli.errors import CheckpointError
from swarmcli.files.durable import discard, flush, write_file

RULES = "keep.json"


@dataclass(frozen=True, slots=True)
class Keep:
    """How many checkpoints stay: `checkpoint.keep`, `keep_every` and `keep_best` of a recipe."""

    newest: int = 3
    every: int = 0  # epochs; 0: none stays for this
    best: int = 1


def kept(losses: Mapping[int, float | None], rules: Keep, latest: int | None = None) -> dict[int, tuple[str, ...]]:
    """Returns why each epoch stays, in words; an epoch that may go is not in it.

    `losses`: each checkpoint's by its epoch; None: not evaluated. `latest`: the one that was written last, which stays:
    a run that was set back writes it beside those of later epochs.
    """
    why: dict[int, tuple[str, ...]] = {}
    # In each stretch of `every` epochs the first checkpoint stays, from the first multiple on: not every run writes one
    # at a multiple, since a peer may get several epochs at once.
    lasting = sorted((epoch for epoch in losses if rules.every and epoch >= rules.every), reverse=True)
    firsts = {epoch // rules.every: epoch for epoch in lasting}
    stays: Sequence[tuple[str, Iterable[int]]] = (
        (f"of the newest {rules.newest}" if rules.newest > 1 else "newest", _newest(losses, rules.newest, latest)),
        (f"every {rules.every}th", firsts.values()),
        ("best", best_epochs(losses, rules.best)),
    )
    for words, epochs in stays:
        for epoch in epochs:
            why[epoch] = (*why.get(epoch, ()), words)
    return why


def best_epochs(losses: Mapping[int, float | None], count: int) -> list[int]:
    """Returns the epochs with the lowest losses, the best first; of equal ones the later."""
    measured = [(loss, -epoch) for epoch, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return [-negative for _, negative in sorted(measured)[:count]]


def _newest(epochs: Collection[int], count: int, latest: int | None) -> list[int]:
    first = [latest] if latest in epochs and latest is not None else []
    return [*first, *sorted(set(epochs) - set(first), reverse=True)][:count]


class CheckpointDirectory:
    """The checkpoints in one directory, which one process writes. `tell` hears what went wrong beside them."""

    def __init__(self, path: Path, keep: Keep | None = None, tell: Callable[[str], object] = lambda text: None) -> None:
        """`keep`: None is what its last writer had."""
        self.path = path
        self.keep = keep or rules_of(path)
        self._tell = tell

    def all(self) -> list[Path]:
        """Returns the checkpoints, the oldest epoch first."""
        if not self.path.is_dir():
            return []
        return sorted((path for path in self.path.iterdir() if NAME.fullmatch(path.name)), key=epoch_of)

    def partial(self, epoch: int) -> Path:
        """Returns where the checkpoint of an epoch is filled, before `put`."""
        return self.path / f".epoch-{epoch:06d}-{os.getpid()}"

    def put(self, partial: Path) -> Path:
        """Gives a checkpoint that was filled, and flushed to the disk, its name; then `latest` names it. Raises
        OSError.

        It may replace a checkpoint of the same epoch, of a run that was resumed before it. Not every system can
        exchange directories in one step, so the older one is moved to a name by which it can still be read.
        """
        place = self.path / f"epoch-{epoch_of(partial):06d}"
        if place.exists():
            self._replace(place, partial)
        else:
            partial.rename(place)
            flush(self.path)
            self._point(LATEST, place)
        return place

    def _replace(self, place: Path, partial: Path) -> None:
        aside = place.with_name(place.name + REPLACED)
        self._move(BEST, [place], self._best(place))  # its loss belongs to the older checkpoint
        self._move(LATEST, [place], partial)
        try:
            place.rename(aside)
            self._move(LATEST, [partial], aside)
            partial.rename(place)
            flush(self.path)
        except OSError:  # the older one stays
            if not place.exists():
                with suppress(OSError):
                    aside.rename(place)
            self._move(LATEST, [partial, aside], place)
            raise
        self._point(LATEST, place)
        discard(aside)

    def mend(self) -> None:
        """Repairs what a killed process left, and writes the rules by which checkpoints stay beside them."""
        if not self.path.is_dir():
            return
        for aside in self.path.glob(f"epoch-*{REPLACED}"):
            place = aside.with_name(aside.name.removesuffix(REPLACED))
            if place.exists():
                discard(aside)
            else:
                if self.linked(LATEST) == aside.name:
                    self._point(LATEST, None)
                with suppress(OSError):
                    aside.rename(place)
        for link in (self.path / LATEST, self.path / BEST):
            if link.is_dir() and not link.is_symlink():
                self._undo_copy(link)
        self._point(LATEST, self._newest())
        self._point(BEST, self._best())
        for left in self.path.glob(".*-*"):  # only this process writes here: its home is locked
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                with suppress(OSError):
                    left.unlink()
        if rules_of(self.path) != self.keep:
            with suppress(OSError):  # if the disk is full, only a list lacks these words
                write_file(self.path / RULES, f"{json.dumps(asdict(self.keep))}\n".encode())

    def _undo_copy(self, link: Path) -> None:
        """`scp -r` makes a directory of a link: a copy of the checkpoint, which would stay old under this name. If only
        the copy came, it gets its own name. A directory that is no checkpoint is somebody's own, and stays."""
        with suppress(CheckpointError):
            place = self.path / f"epoch-{read_manifest(link)['epoch']:06d}"
            with suppress(OSError):
                link.rename(place)  # fails if that exists
            discard(link)

    def remember_loss(self, place: Path, loss: float, samples: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Writes down the loss of a checkpoint's evaluation; returns whether it is the best one now."""
        measured = {"loss": loss if math.isfinite(loss) else None, "samples": samples, "metrics": dict(metrics or {})}
        text = json.dumps(measured) + "\n"
        try:
            write_file(place / EVALUATION, text.encode())
        except OSError as error:
            self._tell(f"the loss of {place} was not written down: {error}")
            return False
        best = self._best()
        self._point(BEST, best)
        return best == place

    def prune(self, written: Path | None = None) -> list[Path]:
        """Removes checkpoints that need not stay, and returns them. `written` stays; None: the one that `latest`
        names."""
        gone = self.to_go(written)
        self.remove(gone)
        return gone

    def to_go(self, written: Path | None = None) -> list[Path]:
        """Returns the checkpoints that need not stay."""
        name = written.name if written is not None else self.linked(LATEST)
        last = epoch_of(Path(name)) if name is not None and NAME.fullmatch(name) else None
        found = self.all()
        staying = kept({epoch_of(path): loss_of(path) for path in found}, self.keep, last)
        return [path for path in found if epoch_of(path) not in staying]

    def remove(self, paths: Iterable[Path]) -> None:
        """Moves the links to what is left, and then removes the checkpoints."""
        going = list(paths)
        left = [path for path in self.all() if path not in going]
        self._move(LATEST, going, left[-1] if left else None)
        self._move(BEST, going, self._best(*going))
        for path in going:
            discard(path)

    def _move(self, name: str, going: Collection[Path], to: Path | None) -> None:
        """A link that names one of those that go names `to` from now on; None: the link is removed."""
        if self.linked(name) in {path.name for path in going}:
            self._point(name, to)
            if self.linked(name) in {path.name for path in going}:  # the disk is full
                with suppress(OSError):
                    (self.path / name).unlink()

    def _newest(self) -> Path | None:
        """Returns the checkpoint that `latest` names, or a later epoch that was written after it: a writer may be
        killed before it moves the link."""
        found = self.all()
        named = next((path for path in found if path.name == self.linked(LATEST)), None)
        if named is None:
            return max(found, key=_written_at, default=None)
        later = [path for path in found if epoch_of(path) > epoch_of(named) and _written_at(path) > _written_at(named)]
        return later[-1] if later else named

    def _best(self, *without: Path) -> Path | None:
        losses = {epoch_of(path): loss_of(path) for path in self.all() if path not in without}
        best = best_epochs(losses, 1)
        return self.path / f"epoch-{best[0]:06d}" if best else None

    def linked(self, link: str) -> str | None:
        """Returns the name that a link holds; None: there is no such link."""
        path = self.path / link
        try:
            if path.is_symlink():
                return path.readlink().name
            return path.read_text(encoding="utf-8")[:100].strip() if path.is_file() else None
        except (OSError, ValueError):
            return None

    def _point(self, name: str, place: Path | None) -> None:
        """The link names this checkpoint from now on; None: the link is removed. A rename replaces it in one step.

        Where the file system has no symbolic links, it is a text file that holds the name. If that fails, the link
        stays as it is.
        """
        link = self.path / name
        if self.linked(name) == (place.name if place else None):
            return
        temporary = self.path / f".{name}-{os.getpid()}"
        try:
            if place is None:
                link.unlink(missing_ok=True)
                return
            temporary.unlink(missing_ok=True)
            try:
                temporary.symlink_to(place.name, target_is_directory=True)
            # Windows lets few users make links: a file with the name replaces it
            except (OSError, NotImplementedError):
                write_file(temporary, f"{place.name}\n".encode())
            temporary.replace(link)
            flush(self.path)
        except OSError as error:
            self._tell(f"{link} does not name the {'newest' if name == LATEST else 'best'} checkpoint: {error}")
            with suppress(OSError):
                temporary.unlink()


def rules_of(directory: Path) -> Keep:
    """Returns the rules that the last writer of a directory left there, or those of a recipe that sets none."""
    found = _small_json(directory / RULES)
    match found:
        case {"newest": int(newest), "every": int(every), "best": int(best)} if min(newest, every, best) >= 0:
            return Keep(newest, every, best)
    return Keep()


def loss_of(place: Path) -> float | None:
    """Returns the loss at which a checkpoint was evaluated; None: it was not evaluated."""
    found = _small_json(place / EVALUATION)
    loss = found.get("loss") if isinstance(found, dict) else None
    with suppress(OverflowError):  # a whole number with hundreds of digits
        return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None
    return None


def _small_json(file: Path) -> object:
    try:
        with file.open("rb") as stream:
            return json.loads(stream.read(1 << 16))  # no honest one is longer
    except (OSError, ValueError, RecursionError):
        return None


def _written_at(place: Path) -> tuple[int, int]:
    try:
        return (place / MANIFEST).stat().st_mtime_ns, epoch_of(place)
    except OSError:
        return 0, epoch_of(place)
