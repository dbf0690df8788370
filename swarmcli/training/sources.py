"""Sources of text: each yields its documents in another order for every pass."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from swarmcli.errors import DataError
from swarmcli.recipe.dataset import ALL_FILES, LOCAL_BUILDERS, format_of
from swarmcli.words import first_words

logger = logging.getLogger(__name__)

# the encoding of all files. It is part of identities: those of a former version lack it, and its places are others
UTF_8 = "utf-8"
CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of a character of UTF-8 after its first

Place: TypeAlias = tuple[int, ...]  # in a pass over a source; each source has its own kind


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How text is read and shuffled, in bounded memory.

    Streamed rows are shuffled a window at a time, since they cannot be read in any order. If a window holds 16,384
    rows, two peers that begin at one place share 1,000 / 16,384 = 6% of their first 1,000 rows; a data set smaller than
    a window is shuffled as a whole.
    """

    segment_bytes: int = 1 << 20  # bytes of a file that are read at once; a larger file is read in several pieces
    window_rows: int = 1 << 16
    window_bytes: int = 32 << 20  # of text
    few_shards: int = 32  # with fewer, a streamed source is read by the parts of its files, if these have parts
    held_out_bytes: int = 1 << 16  # a file is held out in pieces of this size, so that a single large one has some, too
    least_block: int = 1024  # sequences that are shuffled together, unless the recipe wants fewer
    most_parts: int = 512  # of a pass that peers share
    block_parts: int = 4  # parts that are shuffled together: a peer that dies leaves so many half read
    most_pixels: int = 1 << 26  # of an image: 200 MB when it is decoded
    most_decoders: int = 8  # threads that decode images: each may hold one of that size
    fewest_parts: int = 8  # with fewer there is nothing to share, and each peer reads in an order of its own


USUAL = DataOptions()


class BadRow(ValueError):
    """A row, a piece of a file or a value that cannot be read, with the reason."""


Content: TypeAlias = str | Mapping[str, Any] | BadRow  # a text, or a row by its columns
Row: TypeAlias = tuple[Content, str]  # with its place


class Document(NamedTuple):
    """A text or a row to learn from."""

    content: Content
    ends: bool  # false: a piece of a file that goes on
    place: Place  # after it, in its pass
    source: int = 0  # the number of its source in a mixture
    begins: bool = True  # false: a piece of a file that began before
    where: str = ""  # its file and row, for people


class PassPart(NamedTuple):
    """One of several parts of a pass, which together hold each document once."""

    number: int
    of: int

    def slice_of(self, length: int) -> slice:
        """Returns which of `length` things in a row this part holds."""
        return slice(self.number * length // self.of, (self.number + 1) * length // self.of)


WHOLE = PassPart(0, 1)


class ClassName(str):
    """The name that a dataset itself has for one of its classes, which its rows hold as a number."""


class TextSource(Protocol):
    """Documents to learn from."""

    @property
    def files(self) -> Sequence[Path]:
        """The files of this computer that are read."""

    def documents(self, seed: str, place: Place = (), part: PassPart = WHOLE) -> Iterator[Document]:
        """Yields the documents of one pass in an order drawn from `seed`, or of a part of it, from `place` on (empty:
        from the beginning).

        Raises DataError when a whole pass has none to read, and ValueError for a place that cannot be in it.
        """

    def parts(self) -> int:
        """How many parts a pass can be divided into; 1: it is read as a whole."""

    def identity(self) -> str:
        """A text that is another one when there is something else to read, so that places in the former mean
        nothing."""


class Permutation:
    """The numbers below `size` in an order drawn from `seed`, computed one by one.

    A Feistel network of four rounds permutes the smallest even number of bits that holds them all; a result that is too
    large is put in again (Black and Rogaway, Ciphers with Arbitrary Finite Domains, section 4).
    """

    def __init__(self, size: int, seed: str) -> None:
        rng = random.Random(seed)
        self._size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits
        self._keys = [rng.getrandbits(64) for _ in range(4)]

    def __getitem__(self, number: int) -> int:
        mask, word = (1 << self._half) - 1, (1 << 64) - 1
        while True:
            left, right = number >> self._half, number & mask
            for key in self._keys:
                # splitmix64's finalizer: each bit of the half and of the key moves every bit of the result.
                mixed = ((right + key) * 0xBF58476D1CE4E5B9) & word
                mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & word
                left, right = right, left ^ ((mixed ^ (mixed >> 31)) & mask)
            number = left << self._half | right
            if number < self._size:
                return number


class Split(NamedTuple):
    """A part of a source: what is held out of it, for evaluations, or the rest, for training."""

    held_out: float  # share of the text
    evaluates: bool


def _held_out(names: Sequence[str], sizes: Sequence[int], share: float, piece: int) -> dict[int, list[int]]:
    """Returns for each file the numbers of its held out pieces of `piece` bytes: those whose hash is among the lowest
    `share` of all hashes, and at least one. Raises DataError where nothing would be left."""
    hashes = [
        (hashlib.blake2b(f"held out {name} {unit}".encode(), digest_size=8).digest(), n, unit)
        for n, (name, size) in enumerate(zip(names, sizes, strict=True))
        for unit in range(-(-size // piece))
    ]
    if len(hashes) < 2:
        raise DataError(
            f"the text is too little to hold some of it out: {piece >> 10} KiB or less in one file; add text, "
            "or remove evaluation.held_out"
        )
    bound = int(share * (1 << 64)).to_bytes(9, "big")
    below = [each for each in hashes if b"\0" + each[0] < bound] or [min(hashes)]
    found: dict[int, list[int]] = {}
    for _, n, unit in sorted(below, key=lambda each: each[1:]):
        found.setdefault(n, []).append(unit)
    return found


def private_among(files: Sequence[Path], root: Path | None = None) -> set[Path]:
    """Returns the run keys among the files, and files in a peer's home: a directory with a journal or an identity,
    `root` or below it (None: only the file's own directory). Whoever has the trained model could have it say what it
    has read."""
    places = {file.parent for file in files}
    if root is not None:
        places |= {above for place in places for above in place.parents if above.is_relative_to(root)}
    homes = {place for place in places if any((place / each).exists() for each in ("identity.key", "journal.sqlite"))}
    return {file for file in files if file.suffix == ".run-key" or not homes.isdisjoint(file.parents)}


class FileSource:
    """Text files. Only their names are held in memory; files are read in segments, in shuffled order.

    A segment that cannot be read, is not UTF-8, holds zero bytes (so it is no text) or begins as a private key comes as
    a BadRow.

    A share of the text can be held out. It depends only on the names of the files below `root` and on places in them,
    so it is the same on every computer, whatever its copy of the files says.
    """

    def __init__(
        self,
        files: Sequence[Path],
        root: Path | None = None,
        split: Split | None = None,
        options: DataOptions = USUAL,
    ) -> None:
        """`split`: which part of the text; None: all of it."""
        self._options = options
        self._by_ending = False  # True: files that by their ending hold rows are left out
        self.files = tuple(files)
        self._root = root
        self._split = split

    @classmethod
    def below(
        cls, path: Path, pattern: str = ALL_FILES, split: Split | None = None, options: DataOptions = USUAL
    ) -> FileSource:
        """One file, or all files below a directory that fit the pattern, except for keys, peers' homes, names that
        begin with a dot and, without a pattern, files of rows.

        Raises DataError with the fix when there are none, or when half of them hold rows.
        """
        if path.is_file():
            if private_among([path]):
                raise DataError(f"{path} is a key, or lies in a peer's home: a model would tell it to everybody")
            return cls([path], path.parent, split, options)
        if not path.is_dir():
            raise DataError(
                f"{path} does not exist; put the text files there, correct `path` in the recipe, or name the directory "
                "in which it begins by --set local.data_dir=DIRECTORY"
            )
        try:
            found = [(file, file.relative_to(path).parts) for file in path.glob(pattern) if file.is_file()]
            shown = [file for file, parts in found if not any(part.startswith(".") for part in parts)]
            private = private_among(shown, path)
            files = [file for file in shown if file not in private]
        except (OSError, ValueError, NotImplementedError) as error:  # pathlib raises the last one for an absolute glob
            raise DataError(f"{path}: the files {pattern!r} cannot be listed ({error}); correct `glob`") from error
        if not files:
            none = "but keys and a peer's home, which are not read" if shown else "that fit " + repr(pattern)
            raise DataError(f"{path} holds no files {none}; put text files there, or correct `glob`")
        source = cls(sorted(files), path, split, options)
        source._by_ending = pattern == ALL_FILES
        rows = list(filter(source._unread, source.files))
        if 2 * len(rows) >= len(files):
            raise DataError(f"{path}: {len(rows):,} of {len(files):,} files: {rows[0].name}: {source._unread(rows[0])}")
        return source

    @classmethod
    def stdlib(cls, split: Split | None = None) -> FileSource:
        """The sources of Python's standard library on this machine, without packages installed beside it."""
        root = Path(sysconfig.get_path("stdlib"))
        files = []
        for place, directories, names in os.walk(root):  # takes a twentieth of Path.rglob's time
            directories[:] = [each for each in directories if each not in ("site-packages", "dist-packages")]
            files += [Path(place, name) for name in names if name.endswith(".py")]
        if not files:
            raise DataError(
                f"Python's standard library has no source files in {root}; "
                "use an interpreter that is not frozen into an archive, or another dataset"
            )
        return cls(sorted(files, key=lambda file: file.parts), root, split)

    def documents(self, seed: str, place: Place = (), part: PassPart = WHOLE) -> Iterator[Document]:
        """A place is the number of pieces read. See TextSource."""
        pieces, sizes = self._pieces, self._sizes
        order = list(range(len(pieces)))
        random.Random(seed).shuffle(order)
        pieces = [pieces[number] for number in order[part.slice_of(len(order))]]
        (begin,) = place or (0,)
        found = begin > 0
        for number, (index, start, length) in enumerate(pieces[begin:], begin + 1):
            file, ends = self.files[index], start + length >= sizes[index]
            if text := self._text_of(file, start, length):
                found = True
                yield Document(text, ends, (number,), begins=not start, where=file.name)
        if not found and part.of == 1:
            raise DataError(f"none of {len(self.files)} files can be read as text, {self.files[0]} among them")

    def _unread(self, file: Path) -> str:
        """Says why a file is not read; "": it is read."""
        if not (self._by_ending and format_of(file.name)):
            return ""
        return f"it holds rows; read them by `path: …/**/*{file.suffix}`, or choose texts by `glob`"

    def _text_of(self, file: Path, start: int, size: int) -> str | BadRow:
        if reason := self._unread(file):
            return BadRow(reason)
        try:
            with file.open("rb") as stream:
                stream.seek(start)
                data, after = stream.read(size), stream.read(3)
            # A character belongs to the segment in which it begins, with all of its two to four bytes.
            if start:
                data = data[:3].lstrip(CONTINUATION) + data[3:]
            data += after[: len(after) - len(after.lstrip(CONTINUATION))]
            text = data.decode(UTF_8)
            if "PRIVATE KEY-----" in text[:50]:
                return BadRow("it is a private key")
        except OSError as error:
            return BadRow(error.strerror)
        except UnicodeError as error:
            place = start + getattr(error, "start", 0)
            return BadRow(f"byte {place:,} is not UTF-8, and texts are read as UTF-8 alone")
        return BadRow("it holds zero bytes, so it is no text") if "\0" in text else text.removeprefix("\ufeff")

    def parts(self) -> int:
        return _parts_of(len(self._pieces), self._options)

    @cached_property  # a pass has hundreds of parts, each of which would ask every file for its size again
    def _sizes(self) -> list[int]:
        return [1 if self._unread(file) else _size_of(file) for file in self.files]

    @cached_property
    def _pieces(self) -> list[tuple[int, int, int]]:
        """The pieces that are read at once: number of the file, first byte, bytes."""
        sizes = self._sizes
        # At least 2,048 pieces, unless they would be smaller than 16 KiB: peers with few pieces would read the same
        # ones.
        segment = min(self._options.segment_bytes, max(1 << 14, -(-sum(sizes) // 2048)))
        return [
            (n, start, min(segment, end - start) if end < sizes[n] else segment)
            for n, begin, end in self._stretches(sizes)
            for start in range(begin, end, segment)
        ]

    def _stretches(self, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yields the bytes to read: number of the file, first byte, byte after the last."""
        if self._split is None:
            yield from ((n, 0, size) for n, size in enumerate(sizes))
            return
        root = self._root or Path()
        names = [file.relative_to(root).as_posix() for file in self.files]
        piece = self._options.held_out_bytes
        held = _held_out(names, sizes, self._split.held_out, piece)
        for n, size in enumerate(sizes):
            begin = 0
            for unit in [*held.get(n, ()), -(-size // piece)]:
                first = min(size, unit * piece)
                if not self._split.evaluates and begin < first:
                    yield n, begin, first
                begin = min(size, first + piece)
                if self._split.evaluates and first < begin:
                    yield n, first, begin

    def identity(self) -> str:
        listed: list[object] = [UTF_8, *([file.name, _size_of(file)] for file in self.files)]
        if self._split is not None:
            listed.append([self._split.held_out, self._split.evaluates])
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


class HuggingFaceSource:
    """A dataset of the library `datasets`, streamed or, with `streaming=False`, downloaded first.

    A pass over a downloaded one is a permutation of its rows. A streamed one is read shard by shard, in an order drawn
    for the pass, and shuffled a window at a time; how many rows or bytes a window has, DataOptions say.
    """

    def __init__(
        self,
        path: str,
        *,
        name: str | None = None,
        split: str = "train",
        data_files: Sequence[str] = (),
        revision: str | None = None,
        text_column: str | None = "text",
        streaming: bool = True,
        public_only: bool = False,
        held_out: Split | None = None,
        options: DataOptions = USUAL,
        called: str = "",
    ) -> None:
        """`text_column`: None for whole rows. `public_only`: whatever files are named, nothing is downloaded from this
        computer or its network. `held_out`: which part of the rows; None: all of them. `called`: the name in messages;
        "": its path."""
        self.path = path
        self._called = called or f"the dataset {path!r}"
        self._public_only = public_only
        self._options = options
        self._data_files = list(data_files)
        self.files = [Path(file) for file in data_files if "://" not in file]
        self._arguments = {
            "name": name, "split": split, "data_files": self._data_files or None, "revision": revision,
            "streaming": streaming,
        }  # fmt: skip
        # lines of JSON are read as texts and parsed one by one, so that a bad one does not end the data
        self._lines = False
        self._replaces = False  # bytes that are not UTF-8 become U+FFFD, so that they do not end the data either
        self._encoded = False  # the library streams the values of a list of JSON encoded: see `_decoded`
        self._names: Sequence[str] = ()  # names of files of this computer
        self._text_column = text_column
        self._held_out = held_out
        self._readers: dict[str, Callable[[Any], Any]] = {}  # by column: makes a value of what is stored
        self._dataset: Any = None

    def documents(self, seed: str, place: Place = (), part: PassPart = WHOLE) -> Iterator[Document]:
        """A place is the number of rows read; in a streamed dataset it is what `_windows` says. See TextSource."""
        opened = self._open()
        read = self._windows if self._arguments["streaming"] else self._permuted
        found = bool(place) or part.of > 1
        try:
            for (content, where), behind in read(opened, seed, place, part):
                if isinstance(content, BadRow) or (content and self._belongs(content)):
                    found = True
                    yield Document(content, True, behind, where=where)
        except (DataError, GeneratorExit):
            raise
        except Exception as error:  # each storage and file format brings its own kinds
            told = first_words(error) + "; save the files as UTF-8" * isinstance(error, UnicodeError)
            raise DataError(f"{self._called} cannot be read on: {told}") from error
        if not found:
            kept = self._held_out is not None and self._held_out.evaluates
            raise DataError(f"{self._called} has no row" + " that is held out; raise evaluation.held_out" * kept)

    def parts(self) -> int:
        """Parts of a streamed dataset are its shards: reading can begin at no other place."""
        opened = self._open()
        return _parts_of(opened.num_shards if self._arguments["streaming"] else len(opened), self._options)

    def identity(self) -> str:
        opened = self._open()
        rows = opened.num_shards if self._arguments["streaming"] else len(opened)
        files = [Path(file) for file in self._data_files]
        sizes = [file.stat().st_size if file.is_file() else 0 for file in files]
        read = [self.path, self._arguments, UTF_8, self._text_column, self._held_out]
        return json.dumps([*read, rows, sizes], default=str)

    def _belongs(self, content: Content) -> bool:
        """Whether a row is in this part. Its content decides, so that it is the same on all computers and however it is
        read, and equal rows are in one part."""
        if self._held_out is None:
            return True
        digest = hashlib.blake2b(b"held out", digest_size=8)
        _feed(digest, content)
        return (
            int.from_bytes(digest.digest(), "big") < self._held_out.held_out * (1 << 64)
        ) == self._held_out.evaluates

    def _permuted(self, dataset: Any, seed: str, place: Place, part: PassPart) -> Iterator[tuple[Row, Place]]:
        (begin,) = place or (0,)
        permutation, numbers = Permutation(len(dataset), seed), range(len(dataset))[part.slice_of(len(dataset))]
        for count, number in enumerate(numbers[begin:], begin + 1):
            row, name = permutation[number], self._names[0] if len(self._names) == 1 else "of all files"
            yield self._row(dataset[row], f"{name}, row {row + 1}"), (count,)

    def _windows(self, dataset: Any, seed: str, place: Place, of_pass: PassPart) -> Iterator[tuple[Row, Place]]:
        """A place is (number of the shard, row in it) where a window begins, and how many of the window's rows were
        read.

        So a stream that goes on reads the window again and leaves out the rows that were read: no row comes twice, and
        none is lost.
        """
        part, row, used = place or (0, 0, 0)
        shards = list(range(dataset.num_shards))
        random.Random(seed).shuffle(shards)
        rows = self._rows(dataset, shards[of_pass.slice_of(len(shards))], part, row)
        while True:
            window, behind, size = [], (part, row), 0
            for content, behind in rows:  # noqa: B007  # where the next window begins
                window.append(content)
                size += _size_of_content(content)
                if len(window) >= self._options.window_rows or size >= self._options.window_bytes:
                    break
            if not window:
                return
            random.Random(f"{seed}/{part}/{row}").shuffle(window)
            for number, content in enumerate(window[used:], used + 1):
                yield content, (part, row, number) if number < len(window) else (*behind, 0)
            (part, row), used = behind, 0

    def _rows(self, dataset: Any, shards: Sequence[int], part: int, row: int) -> Iterator[tuple[Row, tuple[int, int]]]:
        """Yields the rows of these shards from a row of the shard of number `part` on, each with the place after it."""
        for number, shard in enumerate(shards[part:], part):
            name = self._names[shard] if len(self._names) == dataset.num_shards else f"shard {shard + 1}"
            rows = dataset.shard(dataset.num_shards, shard).skip(row)
            for values in _decoded(rows) if self._encoded else rows:
                row += 1
                yield self._row(values, f"{name}, row {row}"), (number, row)
            row = 0

    def _open(self) -> Any:
        if self._dataset is not None:
            return self._dataset
        try:
            import datasets
        except ImportError as error:
            raise DataError(f"{self._called} needs the library datasets; pip install 'swarmcli[datasets]'") from error
        if self._public_only:
            from swarmcli.training.public_web import only_public_hosts

            only_public_hosts()
        try:
            reader, options = self._reader(datasets)
            opened = datasets.load_dataset(reader, **self._arguments, **options)
            if self._arguments["streaming"] and opened.num_shards < self._options.few_shards:
                # If a file can be read in parts (Parquet in row groups), each becomes a shard to begin at. The library
                # asks every file for its parts, so this is for few files.
                opened = opened.reshard()
            # the library knows the features of all but lists of JSON
            self._encoded = opened.features is None and reader != "text"
            self._dataset = self._undecoded(opened)
        except Exception as error:  # as above
            raise DataError(
                f"{self._called} cannot be opened: {first_words(error)}; check its keys in the recipe"
            ) from error
        return self._dataset

    def _reader(self, datasets: Any) -> tuple[str, dict[str, Any]]:
        """Returns the library's reader of the files, and options with which it reads texts as they are written."""
        here = self.path in LOCAL_BUILDERS and len(self.files) == len(self._data_files)
        files = datasets.data_files.DataFilesList.from_patterns(self._data_files) if here else []
        self._names = [Path(file).name for file in files]
        if self.path == "text" and (private := private_among([Path(file) for file in files])):
            raise ValueError(f"{min(private)} is a key, or lies in a peer's home: a model would tell it to everybody")
        options: dict[str, Any] = {"encoding": "utf-8-sig"}  # with a byte order mark or without
        self._replaces = self.path in ("csv", "text")
        if self._replaces:
            options["encoding_errors"] = "replace"
        if self.path == "csv":
            import pandas  # type: ignore[import-untyped]

            options["sep"] = "\t" if ".tsv" in self._data_files[0].lower() else ","
            heads = {file: pandas.read_csv(file, nrows=1, **options) for file in files}
            for file, head in heads.items():
                if "\ufffd" in "".join(head.columns):
                    raise UnicodeError(f"the header of {Path(file).name} is not UTF-8")
                if not isinstance(head.index, pandas.RangeIndex):  # pandas would take its first cells for names of rows
                    raise ValueError(f"{Path(file).name}, row 1: it has more cells than the header; mend one of them")
            if heads:  # all columns are texts: 007 is not 7
                common = sorted(set.intersection(*(set(head.columns) for head in heads.values())))
                options["features"] = datasets.Features(dict.fromkeys(common, datasets.Value("string")))
            # Only an empty cell is missing.
            return "csv", {**options, "keep_default_na": False, "na_values": [""], "on_bad_lines": "warn"}
        if self.path == "json" and files and all(map(_is_in_lines, files)):
            self._lines = True
            return "text", {**options, "encoding_errors": "backslashreplace"}
        return self.path, options if self._replaces or self.path == "json" else {}

    def _undecoded(self, dataset: Any) -> Any:
        """Returns the dataset so that the library opens no file and no address for a row: rows may name any, of this
        computer too. Columns of images stay, as they are stored; other columns of that kind (sound, video) are left
        out."""
        from datasets import Image

        for name, feature in list((dataset.features or {}).items()):
            if isinstance(feature, Image):
                dataset = dataset.cast_column(name, Image(decode=False))
                self._readers[name] = partial(self._image_of, mode=feature.mode)
            elif _is_decoded(feature):
                dataset = dataset.remove_columns(name)
            elif names := _names_in(feature):
                self._readers[name] = partial(_named, names=names)
        return dataset

    def _image_of(self, stored: Any, mode: str | None) -> Any:
        """Returns an image, of which only the size was read, with the mode that its column wants; BadRow if it is no
        image."""
        from PIL import Image

        try:
            data = stored["bytes"]
            if data is None and self.path == "imagefolder":  # the library finds only files that were named
                data = Path(stored["path"]).read_bytes()
            image = Image.open(io.BytesIO(data))
            if image.width * image.height > self._options.most_pixels:
                raise ValueError(f"it has {image.width} × {image.height} pixels")
            image.mode_of_column = mode  # type: ignore[attr-defined]
            image.stored = data  # type: ignore[attr-defined]  # tells images apart before they are decoded
            return image
        except (OSError, ValueError, TypeError, KeyError, Image.DecompressionBombError) as error:
            return BadRow(f"it is no image ({first_words(error).partition(' <')[0]})")

    def _row(self, values: dict[str, Any], where: str) -> Row:
        """Returns a row, or why it cannot be read, and its place."""
        if self.path == "imagefolder":  # each row is a file
            where = "/".join(Path(values["image"]["path"]).parts[-2:])
        try:
            if self._replaces and any("\ufffd" in value for value in values.values() if isinstance(value, str)):
                raise BadRow("it has U+FFFD, as of bytes that are not UTF-8, and rows are read as UTF-8 alone")
            if self._lines and not values["text"].strip():
                return "", where  # a blank line is no row
            return self._content_of(_parsed(values["text"]) if self._lines else values), where
        except BadRow as error:
            return error, where

    def _content_of(self, row: dict[str, Any]) -> Content:
        if self._text_column is None:
            return row | {name: read(row[name]) for name, read in self._readers.items() if name in row}
        if self._text_column not in row:
            raise BadRow(f"it has no column {self._text_column!r}; set field to one of " + ", ".join(sorted(row)))
        text = row[self._text_column]
        if not isinstance(text, str) or not text:
            raise BadRow(f"{self._text_column} is {text!r:.60}, and should be text")
        return text


def _decoded(rows: Any) -> Iterator[dict[str, Any]]:
    """Streamed rows as values: where a column has several kinds the library hands out their JSON."""
    from datasets import Features
    from datasets.formatting import get_formatter

    reader = lru_cache(lambda schema: get_formatter("python", features=Features.from_arrow_schema(schema)))
    return (reader(table.schema).format_row(table) for table in rows.with_format("arrow"))


def _is_in_lines(file: str) -> bool:
    """Whether each line of a file of JSON is a row: otherwise it is one list, or one object."""
    import fsspec

    with fsspec.open(file, "rt", compression="infer", encoding="utf-8-sig", errors="replace") as stream:
        head = stream.readline(1 << 10).strip()
    return ".json" not in Path(file.lower()).suffixes or (head.startswith("{") and head != "{")


def _parsed(line: str) -> dict[str, Any]:
    """A row of JSON. Raises BadRow."""
    try:
        row = dict(json.loads(line))
        if re.search(r"\\u[dD][89a-fA-F]", line):  # lone surrogates
            json.dumps(row, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"it is no row of JSON in UTF-8 ({first_words(error)})") from None
    return row


def _is_decoded(feature: Any) -> bool:
    """Whether the library decodes something in a column that may lie elsewhere: images, sound, video. Values of several
    kinds are JSON, and lie in the row."""
    if hasattr(feature, "decode_example"):
        return type(feature).__name__ != "Json"
    inner = feature.values() if isinstance(feature, Mapping) else feature if isinstance(feature, list) else ()
    return any(map(_is_decoded, inner)) or (hasattr(feature, "feature") and _is_decoded(feature.feature))


def _names_in(feature: Any) -> Sequence[ClassName]:
    """Returns the names of classes, if a column holds classes or lists of them; (): its values are used as they are."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    names = [ClassName(name) for name in getattr(feature, "names", None) or ()]
    return () if names == [str(number) for number in range(len(names))] else names  # those are mere numbers


def _named(value: Any, names: Sequence[ClassName]) -> Any:
    if isinstance(value, list):
        return [_named(each, names) for each in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value  # -1: it has no label


def _feed(digest: hashlib.blake2b, content: object) -> None:
    """Feeds a row into a digest."""
    if isinstance(content, Mapping):
        for name in sorted(content):
            if content[name] is not None:  # some formats leave nulls out
                _feed(digest, [name, content[name]])
    elif isinstance(content, list | tuple):
        digest.update(b"[%d]" % len(content))
        for item in content:
            _feed(digest, item)
    else:
        content = None if isinstance(content, BadRow) else content  # its words depend on this computer's libraries
        data = content.stored if hasattr(content, "stored") else str(content).encode(errors="replace")
        digest.update(b"%d:" % len(data) + data)


def _size_of_content(content: object) -> int:
    """Bytes that a row takes in memory, about."""
    if isinstance(content, str | bytes):
        return len(content)
    if isinstance(content, Mapping):
        return sum(map(_size_of_content, content.values()))
    if isinstance(content, list | tuple):
        return sum(map(_size_of_content, content))
    width, height = getattr(content, "size", (0, 0)) if hasattr(content, "getbands") else (0, 0)  # an image
    return 8 + 3 * width * height


def _parts_of(things: int, options: DataOptions) -> int:
    """Returns how many parts a pass has, over `things` at each of which reading can begin."""
    return min(things, options.most_parts) if things >= options.fewest_parts else 1


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        logger.warning("%s is passed over: %s", file, error.strerror)
        return 0
