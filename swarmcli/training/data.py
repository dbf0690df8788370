"""From documents to shuffled micro-batches, in bounded memory, from any place on.

    sources ── drawn by weight ──▶ documents ── tokenizer ──▶ packed sequences ── shuffled blocks ──▶ batches

Held at any time: what the sources hold, a document and its tokens, and one block (sequences × length × 4 bytes).

Everything is drawn from the seed, the number of the pass, of the document or of the block, never from a generator that
goes along. So a stream goes on where another one was: it begins with the document in which that one's block began,
packs the block again, and leaves out what had been drawn of it. No sequence comes twice, and none is lost.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swarmcli.errors import DataError, RecipeError
from swarmcli.machine.places import data_directory
from swarmcli.recipe import FilesDataset, HuggingFaceDataset, Recipe, StdlibDataset
from swarmcli.training.sources import (
    USUAL,
    DataOptions,
    Document,
    FileSource,
    HuggingFaceSource,
    Place,
    Split,
    TextSource,
)
from swarmcli.training.task import Batch
from swarmcli.training.tokenizer import Tokenizer, Tokens

LOCAL_BUILDERS = ("json", "parquet", "csv", "text", "arrow")  # formats of `datasets` that read files of this machine


def open_source(
    recipe: Recipe, dataset: FilesDataset | StdlibDataset | HuggingFaceDataset, split: Split | None = None
) -> TextSource:
    """The source that an item of `datasets` names, or a part of its text files. Raises DataError with the fix when its
    files are missing."""
    if isinstance(dataset, StdlibDataset):
        return FileSource.stdlib(split)
    if isinstance(dataset, FilesDataset):
        return FileSource.below(recipe.locate(dataset.path, data=True), dataset.glob, split)
    local = dataset.path in LOCAL_BUILDERS
    files = [
        str(recipe.locate(file, data=True)) if local and "://" not in file else file for file in dataset.data_files
    ]
    if not local and Path(dataset.path).exists():
        # The library would read it in place of the Hub's, whatever lies in there; and names are chosen by strangers.
        raise DataError(
            f"{dataset.path!r} is the name of a dataset on the Hub, and {Path(dataset.path).absolute()} exists on this "
            "computer, which would be read instead; start swarm in another directory"
        )
    return HuggingFaceSource(
        dataset.path,
        name=dataset.name,
        split=dataset.split,
        data_files=files,
        revision=dataset.revision,
        text_column=dataset.text_column,
        streaming=dataset.streaming,
        # Strangers have written a recipe that lies where those are kept that links have brought.
        public_only=recipe.directory.resolve().parent == data_directory().resolve(),
    )


def _open_item(recipe: Recipe, index: int) -> TextSource:
    held_out = recipe.evaluation.held_out
    try:
        return open_source(recipe, recipe.datasets[index], Split(held_out, evaluates=False) if held_out else None)
    except DataError as error:
        raise RecipeError(f"{recipe.origin('datasets', index, 'path')}: datasets.{index}: {error}") from error


@dataclass(frozen=True)
class Mixed:
    """Where a stream of documents from several sources is: how many were drawn, and each source's pass and place."""

    drawn: int
    passes: tuple[int, ...]
    places: tuple[Place, ...]

    @classmethod
    def beginning(cls, sources: int) -> Mixed:
        return cls(0, (0,) * sources, ((),) * sources)


def mix(
    sources: Sequence[TextSource], weights: Sequence[float], seed: str, where: Mixed
) -> Iterator[tuple[Document, Mixed]]:
    """Documents of all sources without end, each with where the stream is behind it.

    Each is drawn from a source with a chance by its weight; one that has come to its end begins another pass in another
    order.
    """
    passes, places = list(where.passes), list(where.places)
    numbers = range(len(sources))
    streams = [sources[n].documents(f"{seed}/{n}/{passes[n]}", places[n]) for n in numbers]
    drawn = where.drawn
    while True:
        n = random.Random(f"{seed}/{drawn}").choices(numbers, weights)[0] if len(sources) > 1 else 0
        while (document := next(streams[n], None)) is None:
            passes[n], places[n] = passes[n] + 1, ()
            streams[n] = sources[n].documents(f"{seed}/{n}/{passes[n]}")
        places[n], drawn = document.place, drawn + 1
        yield document, Mixed(drawn, tuple(passes), tuple(places))


@dataclass(frozen=True)
class Packed:
    """Where a stream of sequences is: before a document, with a rest of the ones before, and how many sequences on."""

    before: Mixed
    rest: tuple[int, ...]  # tokens, fewer than a sequence has
    behind: int  # sequences that begin in this rest and that document


def pack(
    documents: Iterator[tuple[Document, Mixed]],
    tokenizer: Tokenizer,
    sequence_len: int,
    where: Packed,
    options: DataOptions = USUAL,
) -> Iterator[tuple[Tokens, Packed, tuple[int, ...]]]:
    """Cuts the stream of tokens into sequences (sequence_len,), each with where the stream is behind it, and the
    sources' passes where it ends.

    Documents follow each other behind an end-of-text. `documents` begin at `where.before`. Raises DataError when all
    text together is shorter than one sequence.
    """
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype=np.int32)
    rest, before, skipped = np.array(where.rest, dtype=np.int32), where.before, where.behind
    short = not where.before.drawn  # until a sequence was filled, as far as is known
    for document, behind in documents:
        if short and min(behind.passes) > 0:
            raise DataError(
                f"all the text is shorter than one sequence of {sequence_len} tokens; lower sequence_len, or add text"
            )
        first, count = tuple(rest.tolist()), 0
        size = options.segment_bytes
        pieces = (document.text[cut : cut + size] for cut in range(0, len(document.text), size))
        for tokens in chain(map(tokenizer.encode, pieces), [end] if document.ends else []):
            rest = np.concatenate([rest, tokens])
            whole = len(rest) - len(rest) % sequence_len
            short = short and not whole
            for sequence in rest[:whole].reshape(-1, sequence_len):
                count += 1
                if count > skipped:
                    yield sequence, Packed(before, first, count), behind.passes
            rest = rest[whole:]
        before, skipped = behind, 0


class TextStream:
    """One peer's endless stream of micro-batches {"input_ids": (batch_size, sequence_len) int64}."""

    def __init__(
        self,
        sources: Sequence[TextSource],
        weights: Sequence[float],
        tokenizer: Tokenizer,
        *,
        seed: int,
        sequence_len: int,
        batch_size: int,
        block: int,
        position: Mapping[str, Any] | None = None,
        options: DataOptions = USUAL,
    ) -> None:
        """`block`: the number of sequences that are shuffled together. `position`: see there; one that is of other
        data, or that cannot be read, raises ValueError."""
        self._seed, self._batch_size, self._block_size = f"swarm/{seed}", batch_size, block
        data = [tokenizer.vocab_size, sequence_len, list(weights), [source.identity() for source in sources]]
        self._data = hashlib.sha256(json.dumps(data).encode()).hexdigest()
        self._options = options
        self._begin = Packed(Mixed.beginning(len(sources)), (), 0)  # of the block
        self._size, self._number, self._drawn = block, 0, 0  # of the block; blocks before it; sequences drawn of it
        if position is not None:
            self._go_to(position, len(sources), sequence_len)
        documents = mix(sources, weights, self._seed, self._begin.before)
        self._sequences = pack(documents, tokenizer, sequence_len, self._begin, options)
        self._block: list[Tokens] = []
        self._least = options.least_block if len(sources) > 1 else 1
        self._ahead: tuple[Tokens, Packed, tuple[int, ...]] | None = None  # the first sequence of the next block
        self._end = self._begin  # of the block

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> Batch:
        rows = np.stack([self._draw() for _ in range(self._batch_size)]).astype(np.int64)
        return {"input_ids": torch.from_numpy(rows)}

    def position(self) -> dict[str, Any]:
        """Where the stream is, as JSON: behind what was drawn. A few hundred numbers, and a rest of a sequence."""
        before = self._begin.before
        return {
            "data": self._data,
            "drawn": before.drawn,
            "passes": list(before.passes),
            "places": [list(place) for place in before.places],
            "rest": list(self._begin.rest),
            "behind": self._begin.behind,
            "block": [self._number, self._size, self._drawn],
        }

    def _go_to(self, position: Mapping[str, Any], sources: int, sequence_len: int) -> None:
        if position.get("data") != self._data:
            raise ValueError("it is of other data, or of another recipe")
        try:
            passes, places, rest = (position[name] for name in ("passes", "places", "rest"))
            before = Mixed(_count(position["drawn"]), _counts(passes), tuple(map(_counts, places)))
            begin = Packed(before, _counts(rest), _count(position["behind"]))
            number, size, drawn = _counts(position["block"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"it cannot be read ({error})") from error
        if (
            not len(before.passes) == len(places) == sources
            or len(rest) >= sequence_len
            or not drawn <= size <= self._options.most_block
        ):
            raise ValueError("its numbers do not belong together")
        self._begin, self._number, self._size, self._drawn = begin, number, size, drawn

    def _draw(self) -> Tokens:
        if not self._block:
            self._fill()
        if self._drawn >= len(self._block):
            self._begin, self._number, self._size, self._drawn = self._end, self._number + 1, self._block_size, 0
            self._fill()
        self._drawn += 1
        return self._block[self._drawn - 1]

    def _fill(self) -> None:
        """Packs the block that begins at `_begin`, and shuffles it.

        It ends with a pass over the data, or sequences of the next pass would come before the last ones of this. Of
        several sources a small one may end its passes all the time, so there a block has some size first.
        """
        self._block, passes = [], None
        while len(self._block) < self._size:
            sequence, end, seen = self._ahead or next(self._sequences)
            self._ahead = None
            if passes not in (None, seen) and len(self._block) >= self._least:
                self._ahead = sequence, end, seen
                break
            self._block.append(sequence.copy())  # a view would keep its whole document alive
            self._end, passes = end, seen
        random.Random(f"{self._seed}/block {self._number}").shuffle(self._block)


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise TypeError(f"a count, not {value!r:.40}")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(map(_count, values))


def text_batches(
    recipe: Recipe, tokenizer: Tokenizer, seed: int, position: Mapping[str, Any] | None = None
) -> TextStream:
    """One peer's endless stream of micro-batches, the same for the same seed. Raises DataError, and ValueError for a
    `position` of other data."""
    # A million tokens, but never fewer sequences than the least, if the recipe allows as many.
    block = min(recipe.local.shuffle_buffer_size, max(USUAL.least_block, (1 << 20) // recipe.sequence_len))
    return TextStream(
        [_open_item(recipe, index) for index in range(len(recipe.datasets))],
        [dataset.weight for dataset in recipe.datasets],
        tokenizer,
        seed=seed,
        sequence_len=recipe.sequence_len,
        batch_size=recipe.micro_batch,
        block=block,
        position=position,
    )


def evaluation_batches(recipe: Recipe, tokenizer: Tokenizer) -> list[Batch]:
    """The run's evaluations read these micro-batches: all peers get the same ones, of text that nobody trains on.

    At most `evaluation.samples` sequences, fewer where there is no more text. Raises DataError with the fix.
    """
    sequences: list[Tokens] = []
    sources = _evaluated(recipe)
    total = sum(weight for weight, _ in sources)
    for weight, source in sources:
        documents = ((document, Mixed(1, (0,), (document.place,))) for document in source.documents("swarm/evaluation"))
        packed = pack(documents, tokenizer, recipe.sequence_len, Packed(Mixed.beginning(1), (), 0))
        wanted = max(1, round(recipe.evaluation.samples * weight / total))
        sequences += [sequence.copy() for sequence, _, _ in islice(packed, wanted)]
    if not sequences:
        raise DataError(
            f"what is held out is shorter than one sequence of {recipe.sequence_len} tokens; raise "
            "evaluation.held_out, or lower sequence_len"
        )
    size = recipe.micro_batch
    batches = [np.stack(sequences[first : first + size]) for first in range(0, len(sequences), size)]
    return [{"input_ids": torch.from_numpy(batch.astype(np.int64))} for batch in batches]


def _evaluated(recipe: Recipe) -> list[tuple[float, TextSource]]:
    named, held_out = recipe.evaluation.dataset, recipe.evaluation.held_out
    if named is not None:
        try:
            source = open_source(recipe, named)
            _check_disjoint(recipe, source)
        except DataError as error:
            raise DataError(f"{recipe.origin('evaluation', 'dataset')}: evaluation.dataset: {error}") from error
        return [(1.0, source)]
    split = Split(held_out, evaluates=True)
    of_files = [each for each in recipe.datasets if not isinstance(each, HuggingFaceDataset)]
    return [(dataset.weight, open_source(recipe, dataset, split)) for dataset in of_files]


def _check_disjoint(recipe: Recipe, source: TextSource) -> None:
    """Refuses files that are trained on as well. Two datasets of the Hub can be compared by their names alone."""
    trained = {file.resolve() for each in recipe.datasets for file in open_source(recipe, each).files}
    both = sorted(file for file in source.files if file.resolve() in trained)
    if both:
        raise DataError(
            f"{len(both)} of its {len(source.files)} files are trained on too, {both[0]} among them; name others, or "
            "use evaluation.held_out instead"
        )
