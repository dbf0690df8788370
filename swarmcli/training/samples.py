"""Makes samples of documents, and shuffled micro-batches of samples, in bounded memory, from any place on.

    sources ── drawn by weight ──▶ documents ── a task's SampleMaker ──▶ samples ── shuffled blocks ──▶ batches

Held at any time: what the sources hold, a document and its samples, and one block of samples.

Every random choice follows from the seed and the number of the pass, the document or the block, never from a generator
that keeps a state. So a stream can go on where another one stopped: it begins with the document in which that one's
block began, makes the block again, and leaves out the samples that were drawn from it. No sample comes twice, and none
is lost.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from swarmcli.errors import DataError
from swarmcli.training.sources import USUAL, BadRow, Content, DataOptions, Document, PassPart, TextSource
from swarmcli.training.task import Batch, PartChooser, Parts
from swarmcli.training.tokenizer import Tokenizer, Tokens
from swarmcli.words import printable

logger = logging.getLogger(__name__)

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Example: TypeAlias = Mapping[str, npt.NDArray[Any]]  # one sample: arrays without a dimension for the batch


@dataclass(frozen=True)
class MixturePosition:
    """Where a stream of documents from several sources is: how many were drawn, and each source's pass and place.

    If peers share passes also: the parts begun (the place is in the last one), and how many parts were chosen in all.
    """

    drawn: Count
    passes: tuple[Count, ...]
    places: tuple[tuple[Count, ...], ...]
    begun: tuple[tuple[Count, ...], ...] = ()
    choices: Count = 0

    @classmethod
    def beginning(cls, sources: int) -> MixturePosition:
        return cls(0, (0,) * sources, ((),) * sources, ((),) * sources)

    @property
    def through(self) -> bool:
        """Whether all sources were read at least once. A peer that shares passes reads only some of their parts; it has
        to have chosen more parts than a pass can have."""
        return min(self.passes) > 0 and not 0 < self.choices <= USUAL.most_parts


PlacedDocuments: TypeAlias = Iterator[tuple[Document, MixturePosition]]  # each with the stream's position after it


@dataclass
class Choices:
    """The parts that a stream reads one after the other. The latest are kept, so that a stream that goes on where this
    one was reads the same parts again before it chooses others."""

    chooser: PartChooser
    first: int = 0  # the number of the first choice that is kept
    made: list[tuple[int, int, int]] = field(default_factory=list)  # source, pass, part

    def get(self, count: int, source: int, parts: int, number: int, begun: Parts) -> tuple[int, int]:
        """Returns the choice of this number: a kept one, or a new one."""
        if count - self.first < len(self.made):
            return self.made[count - self.first][1:]
        chosen = self.chooser.next_part(source, parts, number, begun)
        self.made.append((source, *chosen))
        return chosen

    def forget(self, before: int) -> None:
        del self.made[: before - self.first]
        self.first = before


def mix(
    sources: Sequence[TextSource],
    weights: Sequence[float],
    seed: str,
    where: MixturePosition,
    choices: Choices | None = None,
) -> PlacedDocuments:
    """Yields documents of all sources without end, each with the stream's position after it.

    The source of each is drawn by weight; a source that has come to its end begins another pass in another order. With
    `choices`, a source that has parts is read part by part, in passes that all peers share.
    """
    passes, places, begun = list(where.passes), list(where.places), list(where.begun or ((),) * len(sources))
    parts = [source.parts() if choices is not None else 1 for source in sources]
    drawn, chosen = where.drawn, where.choices

    def opened(n: int) -> Iterator[Document]:
        if choices is None or parts[n] == 1:
            return sources[n].documents(f"{seed}/{n}/{passes[n]}", places[n])
        if not begun[n]:
            return iter(())
        part = PassPart(begun[n][-1], parts[n])
        return sources[n].documents(f"{choices.chooser.seed}/{n}/{passes[n]}", places[n], part)

    def go_on(n: int) -> None:
        nonlocal chosen
        places[n] = ()
        if choices is None or parts[n] == 1:
            passes[n] += 1
            return
        number, part = choices.get(chosen, n, parts[n], passes[n], begun[n])
        begun[n] = (*(begun[n] if number == passes[n] else ()), part)
        passes[n], chosen = number, chosen + 1

    numbers = range(len(sources))
    streams = [opened(n) for n in numbers]
    while True:
        n = random.Random(f"{seed}/{drawn}").choices(numbers, weights)[0] if len(sources) > 1 else 0
        empty = 0  # parts in a row without a document
        while (document := next(streams[n], None)) is None:
            if empty > parts[n] > 1:
                next(sources[n].documents(seed), None)  # raises DataError if nothing of the source can be read
            go_on(n)
            streams[n], empty = opened(n), empty + 1
        places[n], drawn = document.place, drawn + 1
        yield document._replace(source=n), MixturePosition(drawn, tuple(passes), tuple(places), tuple(begun), chosen)


@dataclass(frozen=True)
class SamplePosition:
    """Where a stream of samples is: before a document, with tokens left over from earlier ones, and how many samples
    further on."""

    before: MixturePosition
    rest: tuple[Count, ...]  # tokens left over, fewer than a sample has
    behind: Count  # samples drawn since, which begin in `rest` or in that document


# A sample, the stream's position after it, and the sources' passes there.
PlacedSample: TypeAlias = tuple[Example, SamplePosition, tuple[int, ...]]


class CountedRows:
    """Makes examples of rows. It counts the rows and those that give none, and keeps the first few different reasons,
    each with its place. It logs the first row that is left out, the tenth, the hundredth and so on."""

    most = 4  # reasons

    def __init__(
        self, name: str, encode: Callable[[Content], Iterator[Example]] = lambda text: iter(({},)), advice: str = ""
    ) -> None:
        """`name`: the recipe's item, as messages name it. `encode` begins to work on a row; its iterator raises BadRow
        before its first example. A row counts when it is iterated. `advice` is said of rows in which there is nothing
        to learn."""
        self.name = name
        self.rows = self.left = self.cut = 0
        self._encode = encode
        self._advice = advice
        self._reasons: dict[str, str] = {}  # reason: place

    def leave(self, where: str, reason: object) -> None:
        self.left += 1
        if len(self._reasons) < self.most:
            self._reasons.setdefault(printable(str(reason)), where)
        if str(self.left).strip("0") == "1":
            logger.warning("%s; the training goes on without", self.skipped())

    def skipped(self) -> str:
        """Says what was left out so far; "": nothing was."""
        told = "; ".join(f"{where}: {reason}" for reason, where in self._reasons.items())
        return f"{self.name}: of {self.rows:,} rows, {self.left:,} left out ({told})" if told else ""

    def __call__(self, row: Content, where: str = "") -> Iterator[Example]:
        """`where`: the row's place, for people."""
        return self._counted(row, where, iter(()) if isinstance(row, BadRow) else self._encode(row))

    def _counted(self, row: Content, where: str, examples: Iterator[Example]) -> Iterator[Example]:
        self.rows += 1
        reason: object = row if isinstance(row, BadRow) else f"nothing to learn{self._advice}"
        teaches = False
        try:
            for example in examples:
                teaches = True
                yield example
        except BadRow as error:
            reason = error
        if not teaches:
            self.leave(where, reason)


class SampleMaker(Protocol):
    """Makes a task's samples of documents, and batches of samples."""

    by_rows: bool  # a sample is one row or several; otherwise a piece of a text, next to other pieces of it

    def samples(self, documents: PlacedDocuments, where: SamplePosition) -> Iterator[PlacedSample]:
        """Yields all samples from `where` on of the documents, which begin at `where.before`. Raises DataError when
        none can be made of a whole pass."""

    def collate(self, samples: Sequence[Example]) -> Batch:
        """Makes one batch of these; all its tensors have the samples in their first dimension."""

    def identity(self) -> Any:
        """A JSON value that is another one when other samples are made of the same documents."""


def pack(
    documents: PlacedDocuments,
    tokenizer: Tokenizer,
    sequence_len: int,
    where: SamplePosition,
    options: DataOptions = USUAL,
    marks: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Iterator[tuple[Tokens, SamplePosition, tuple[int, ...]]]:
    """Cuts the stream of tokens into sequences (sequence_len,). Yields each with the stream's position after it, and
    the sources' passes there.

    Each document is put between `marks`; without them between the tokenizer's own. `documents` begin at `where.before`.
    Raises DataError when all text together is shorter than one sequence.
    """
    begin, end = (np.array(ids, dtype=np.int32) for ids in marks or (tokenizer.before, tokenizer.behind))
    rest, before, skipped = np.array(where.rest, dtype=np.int32), where.before, where.behind
    # A long text is encoded in pieces, which have the tokens of the whole if it is cut before a single space. Some
    # tokenizers put a space before each text, even if it begins with one; then that one is removed.
    size = f"{{1,{options.segment_bytes}}}"
    parted = re.compile(rf"(?s).{size}(?:\Z|(?<=\S)(?= \S))|.{size}")
    both, first_one, second = map(tokenizer.encode, ("a a", "a", " a"))
    doubled = "" if np.array_equal(both, [*first_one, *second]) else " "
    short = not where.before.drawn  # no sequence was filled yet, as far as is known
    left = CountedRows("the data")
    for document, behind in documents:
        if short and (behind.through or left.left >= RowByRow.soon):
            few = f"all the text is shorter than one sequence of {sequence_len} tokens; lower sequence_len, or add text"
            problem = "no text can be read" if left.left == left.rows else few
            raise DataError(problem + (f" ({left.skipped()})" if left.left else ""))
        first, count, text = tuple(rest.tolist()), 0, document.content
        left.rows += 1
        if isinstance(text, BadRow):
            left.leave(document.where, text)
            text, document = "", document._replace(begins=False, ends=False)
        assert isinstance(text, str)
        pieces = (each[0].removeprefix(doubled * (each.start() > 0)) for each in parted.finditer(text))
        encoded = map(tokenizer.encode, pieces)
        for tokens in chain([begin] if document.begins else [], encoded, [end] if document.ends else []):
            rest = np.concatenate([rest, tokens])
            whole = len(rest) - len(rest) % sequence_len
            short = short and not whole
            for sequence in rest[:whole].reshape(-1, sequence_len):
                count += 1
                if count > skipped:
                    yield sequence, SamplePosition(before, first, count), behind.passes
            rest = rest[whole:]
        before, skipped = behind, 0


class TextRun:
    """Samples {"input_ids": (sequence_len,) int64} of texts put one after the other, cut wherever a sample is full."""

    def __init__(self, tokenizer: Tokenizer, sequence_len: int) -> None:
        self.by_rows = False
        self._marks = tokenizer.before, tokenizer.behind
        self._tokenizer = tokenizer
        self._sequence_len = sequence_len

    def samples(self, documents: PlacedDocuments, where: SamplePosition) -> Iterator[PlacedSample]:
        packed = pack(documents, self._tokenizer, self._sequence_len, where, marks=self._marks)
        # Copied: a view would keep its whole document alive.
        return (({"input_ids": tokens.copy()}, place, passes) for tokens, place, passes in packed)

    def collate(self, samples: Sequence[Example]) -> Batch:
        return stacked(samples)

    def identity(self) -> Any:
        return [self._tokenizer.vocab_size, self._sequence_len, *map(list, self._marks)]


class RowByRow:
    """Samples of one document each, or of parts of it; `encoders` make them, one for each source.

    An encoder raises DataError if the data cannot have such rows at all, and gives no sample for a row that cannot be
    read, or that teaches nothing.
    """

    by_rows = True
    soon = 1000  # rows without any sample after which the data are refused: a pass over a large dataset may take days

    def __init__(
        self,
        encoders: Sequence[CountedRows],
        collate: Callable[[Sequence[Example]], Batch],
        identity: Any,
        begun: int = 0,
    ) -> None:
        """`begun`: how many further rows are given to their encoders before a row's samples are wanted, for encoders
        that work in other threads; samples still come in the order of the rows."""
        self._encoders = encoders
        self.collate = collate
        self._identity = identity
        self._begun = begun

    def samples(self, documents: PlacedDocuments, where: SamplePosition) -> Iterator[PlacedSample]:
        none = not where.before.drawn  # no sample so far, as far as is known
        before, skipped = where.before, where.behind
        for behind, examples in self._encoded(documents):
            if none and (behind.through or behind.drawn > self.soon):
                found = "; ".join(filter(None, (each.skipped() for each in self._encoders)))
                which = "no row" if behind.through else f"none of the first {self.soon:,} rows"
                raise DataError(
                    f"{which} of the data teaches anything; {found or 'check which columns the recipe reads'}"
                )
            for number, example in enumerate(examples, 1):
                none = False
                if number > skipped:
                    yield example, SamplePosition(before, (), number), behind.passes
            before, skipped = behind, 0

    def _encoded(self, documents: PlacedDocuments) -> Iterator[tuple[MixturePosition, Iterator[Example]]]:
        begun: deque[tuple[MixturePosition, Iterator[Example]]] = deque()
        try:
            for document, behind in documents:
                begun.append((behind, self._encoders[document.source](document.content, document.where)))
                if len(begun) > self._begun:
                    yield begun.popleft()
        except DataError:
            yield from begun  # the rows before the one that cannot be read come first
            raise
        yield from begun

    def identity(self) -> Any:
        return self._identity


class Packs:
    """Joins samples of another maker, in their order, to samples of at most `sequence_len` tokens.

    "position_ids" say where each begins, so that a model can keep them apart.
    """

    by_rows = True

    def __init__(self, rows: RowByRow, sequence_len: int) -> None:
        self._rows = rows
        self._sequence_len = sequence_len
        self.collate = rows.collate

    def samples(self, documents: PlacedDocuments, where: SamplePosition) -> Iterator[PlacedSample]:
        fitting: list[Example] = []
        place, passes, free = where, where.before.passes, self._sequence_len  # after those that fit
        for example, behind, seen in self._rows.samples(documents, where):
            if fitting and len(example["input_ids"]) > free:
                yield _joined(fitting), place, passes
                fitting, free = [], self._sequence_len
            fitting.append(example)
            place, passes, free = behind, seen, free - len(example["input_ids"])
        if fitting:
            yield _joined(fitting), place, passes

    def identity(self) -> Any:
        return ["packed", self._rows.identity()]


def _joined(examples: Sequence[Example]) -> Example:
    positions = [np.arange(len(example["input_ids"])) for example in examples]
    joined = {name: np.concatenate([example[name] for example in examples]) for name in examples[0]}
    return {**joined, "position_ids": np.concatenate(positions)}


def stacked(samples: Sequence[Example]) -> Batch:
    """A batch of samples whose arrays have the same shapes. Whole numbers become int64."""
    return {name: tensor_of(np.stack([sample[name] for sample in samples])) for name in samples[0]}


def padded(samples: Sequence[Example], fill: Mapping[str, int], least: int = 0, *, before: bool = False) -> Batch:
    """Makes a batch of samples whose arrays (n,) have unlike lengths: those shorter than the longest, or than `least`,
    are filled up with their name's `fill` at the end, or at the beginning (`before`)."""
    longest = max(least, *(len(sample[name]) for sample in samples for name in fill))
    return stacked(
        [
            {
                name: np.pad(array, (0, longest - len(array))[:: -1 if before else 1], constant_values=fill[name])
                if name in fill
                else array
                for name, array in sample.items()
            }
            for sample in samples
        ]
    )


def tensor_of(array: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else array)


class StreamPosition(msgspec.Struct, frozen=True):
    """Where a stream of micro-batches is: after the samples that were drawn. A few hundred numbers, and a part of a
    sample."""

    data: str  # a hash of all that decides which samples there are
    begin: SamplePosition  # of the block
    block: tuple[Count, Count, Count]  # its number, its size, and the samples that were drawn of it
    choices: tuple[tuple[Count, Count, Count], ...]  # of parts of the block: source, pass, part


class SampleStream:
    """One peer's endless stream of micro-batches."""

    def __init__(
        self,
        sources: Sequence[TextSource],
        weights: Sequence[float],
        maker: SampleMaker,
        *,
        seed: int,
        batch_size: int,
        block: int,
        position: Mapping[str, Any] | None = None,
        chooser: PartChooser | None = None,
    ) -> None:
        """`block`: the number of samples that are shuffled together. `chooser` chooses parts of passes that peers
        share; None: this peer reads all parts itself. `position`: see `position()`; one that is of other data, or that
        cannot be read, raises ValueError."""
        self._seed, self._batch_size, self._block_size = f"swarm/{seed}", batch_size, block
        self._maker = maker
        shared = chooser.seed if chooser is not None else None
        data = [maker.identity(), list(weights), [source.identity() for source in sources], shared]
        self._data = hashlib.sha256(json.dumps(data).encode()).hexdigest()
        self._choices = Choices(chooser) if chooser is not None else None
        self._begin = SamplePosition(MixturePosition.beginning(len(sources)), (), 0)  # of the block
        self._size, self._number, self._drawn = block, 0, 0  # of the block; blocks before it; samples drawn of it
        if position is not None:
            self._go_to(position)
        documents = mix(sources, weights, self._seed, self._begin.before, self._choices)
        self._samples = maker.samples(documents, self._begin)
        self._block: list[Example] = []
        self._least = USUAL.least_block if len(sources) > 1 else 1
        self._ahead: PlacedSample | None = None  # the first sample of the next block
        self._end = self._begin  # of the block

    def __iter__(self) -> SampleStream:
        return self

    def __next__(self) -> Batch:
        return self._maker.collate([self._draw() for _ in range(self._batch_size)])

    def position(self) -> dict[str, Any]:
        """Returns a StreamPosition, as JSON."""
        block = self._number, self._size, self._drawn
        choices = tuple(self._choices.made) if self._choices else ()
        return msgspec.to_builtins(StreamPosition(self._data, self._begin, block, choices))

    def _go_to(self, position: Mapping[str, Any]) -> None:
        if position.get("data") != self._data:
            raise ValueError("it is of other data, or of another recipe")
        try:
            found = msgspec.convert(position, StreamPosition)
        except msgspec.ValidationError as error:
            raise ValueError(f"it cannot be read ({error})") from error
        self._begin, before = found.begin, found.begin.before
        self._number, self._size, self._drawn = found.block
        if self._choices is not None:
            self._choices.first, self._choices.made = before.choices, list(found.choices)
            self._choices.chooser.settle(before.passes, before.begun)

    def _draw(self) -> Example:
        if not self._block:
            self._fill()
        if self._drawn >= len(self._block):
            self._begin, self._number, self._size, self._drawn = self._end, self._number + 1, self._block_size, 0
            if self._choices is not None:
                self._choices.forget(self._begin.before.choices)
                self._choices.chooser.settle(self._begin.before.passes, self._begin.before.begun)
            self._fill()
        self._drawn += 1
        return self._block[self._drawn - 1]

    def _fill(self) -> None:
        """Makes the block that begins at `_begin`, and shuffles it.

        A block ends with a pass over the data, or samples of the next pass would come before the last ones of this. If
        there are several sources, a small one may end its passes all the time, so a block has `_least` samples first.
        In passes that peers share, a block takes only a few parts: if this peer dies, others read those again.
        """
        self._block, passes = [], None
        most = self._begin.before.choices + USUAL.block_parts
        while len(self._block) < self._size:
            sample, end, seen = self._ahead or next(self._samples)
            self._ahead = None
            of_next = passes not in (None, seen) and len(self._block) >= self._least
            if self._block and (of_next or end.before.choices > most):
                self._ahead = sample, end, seen
                break
            self._block.append(sample)
            self._end, passes = end, seen
        random.Random(f"{self._seed}/block {self._number}").shuffle(self._block)
