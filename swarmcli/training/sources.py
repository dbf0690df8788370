"""Where text comes from: each source gives its documents in an order of its own for every pass."""

from __future__ import annotations

import codecs
import logging
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from swarmcli.errors import DataError

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 1 << 20  # what is read of a file at once; a larger file is several documents


class TextSource(Protocol):
    """Documents to learn from."""

    def documents(self, rng: random.Random) -> Iterator[str]:
        """One pass over all documents in an order drawn from `rng`. Raises DataError when there are none to read."""


class FileSource:
    """Text files. Only their names are held in memory; files are read in segments, in shuffled order.

    A file that cannot be read, or holds zero bytes (so it is no text), is passed over with a warning in the log.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)

    @classmethod
    def below(cls, path: Path, pattern: str = "**/*") -> FileSource:
        """One file, or all files below a directory that fit the pattern; names that begin with a dot are left out.

        Raises DataError with the fix when there are none.
        """
        if path.is_file():
            return cls([path])
        if not path.is_dir():
            raise DataError(f"{path} does not exist; put the text files there, or correct `path` in the recipe")
        try:
            files = [file for file in path.glob(pattern) if file.is_file() and not _hidden(file, path)]
        except (OSError, ValueError, NotImplementedError) as error:  # the last is what pathlib says to an absolute glob
            raise DataError(f"{path}: the files {pattern!r} cannot be listed ({error}); correct `glob`") from error
        if not files:
            raise DataError(f"{path} holds no files that fit {pattern!r}; put text files there, or correct `glob`")
        return cls(sorted(files))

    @classmethod
    def stdlib(cls) -> FileSource:
        """The sources of Python's standard library on this machine, without packages installed beside it."""
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(file.parts)]
        if not files:
            raise DataError(
                f"Python's standard library has no source files in {root}; "
                "use an interpreter that is not frozen into an archive, or another dataset"
            )
        return cls(sorted(files))

    def __len__(self) -> int:
        return len(self._files)

    def documents(self, rng: random.Random) -> Iterator[str]:
        segments = [(index, start) for index, file in enumerate(self._files) for start in _starts(file)]
        rng.shuffle(segments)
        found = False
        for index, start in segments:
            text = _read_segment(self._files[index], start)
            if text:
                found = True
                yield text
        if not found:
            raise DataError(f"none of {len(self._files)} files can be read as text, {self._files[0]} among them")


class HuggingFaceSource:
    """A dataset of the library `datasets`, streamed: nothing is read that is not about to be used."""

    def __init__(
        self,
        path: str,
        *,
        name: str | None = None,
        split: str = "train",
        data_files: Sequence[str] = (),
        revision: str | None = None,
        text_column: str = "text",
        streaming: bool = True,
        buffer_size: int = 256,
    ) -> None:
        self.path = path
        self._arguments = {
            "name": name, "split": split, "data_files": list(data_files) or None, "revision": revision,
            "streaming": streaming,
        }  # fmt: skip
        self._text_column = text_column
        self._buffer_size = buffer_size  # documents

    def documents(self, rng: random.Random) -> Iterator[str]:
        rows = self._open().shuffle(seed=rng.getrandbits(32), buffer_size=self._buffer_size)
        found = False
        try:
            for row in rows:
                text = self._text_of(row)
                if text:
                    found = True
                    yield text
        except (DataError, GeneratorExit):
            raise
        except Exception as error:  # each storage and file format brings its own kinds
            raise DataError(f"the dataset {self.path!r} cannot be read on: {_first_line(error)}") from error
        if not found:
            raise DataError(f"the dataset {self.path!r} has no text in its column {self._text_column!r}")

    def _open(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                f"the dataset {self.path!r} needs the library datasets; pip install 'swarmcli[datasets]'"
            ) from error
        try:
            opened = datasets.load_dataset(self.path, **self._arguments)
            # A map-style dataset in shards is shuffled like a streamed one: shards first, then a buffer.
            return opened if self._arguments["streaming"] else opened.to_iterable_dataset(min(64, max(1, len(opened))))
        except Exception as error:  # as above
            raise DataError(
                f"the dataset {self.path!r} cannot be opened: {_first_line(error)}; check its keys in the recipe"
            ) from error

    def _text_of(self, row: dict[str, object]) -> str:
        if self._text_column not in row:
            raise DataError(
                f"the dataset {self.path!r} has no column {self._text_column!r}; set text_column to one of "
                + ", ".join(sorted(row))
            )
        text = row[self._text_column]
        return text if isinstance(text, str) else ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _starts(file: Path) -> range:
    try:
        return range(0, file.stat().st_size, SEGMENT_BYTES)
    except OSError as error:
        logger.warning("%s is passed over: %s", file, error.strerror)
        return range(0)


def _read_segment(file: Path, start: int) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            data = stream.read(SEGMENT_BYTES)
    except OSError as error:
        logger.warning("%s is passed over: %s", file, error.strerror)
        return ""
    if b"\0" in data:
        logger.warning("%s is passed over: it holds zero bytes, so it is no text", file)
        return ""
    ends_here = len(data) < SEGMENT_BYTES
    if start:
        data = data.lstrip(bytes(range(0x80, 0xC0)))  # the rest of a character that the segment before began
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(data, final=ends_here)
