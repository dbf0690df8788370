"""From documents to shuffled micro-batches, in bounded memory.

    sources ── drawn by weight ──▶ documents ── tokenizer ──▶ packed sequences ── shuffle buffer ──▶ batches

Held at any time: one segment of text, its tokens, and the shuffle buffer (sequences × length × 4 bytes).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch

from swarmcli.recipe import FilesDataset, HuggingFaceDataset, Recipe, StdlibDataset
from swarmcli.training.sources import SEGMENT_BYTES, FileSource, HuggingFaceSource, TextSource
from swarmcli.training.task import Batch
from swarmcli.training.tokenizer import Tokenizer, Tokens

LOCAL_BUILDERS = ("json", "parquet", "csv", "text", "arrow")  # formats of `datasets` that read files of this machine


def open_source(recipe: Recipe, dataset: FilesDataset | StdlibDataset | HuggingFaceDataset) -> TextSource:
    """The source that an item of `datasets` names. Raises DataError with the fix when its files are missing."""
    if isinstance(dataset, StdlibDataset):
        return FileSource.stdlib()
    if isinstance(dataset, FilesDataset):
        return FileSource.below(recipe.locate(dataset.path, data=True), dataset.glob)
    local = dataset.path in LOCAL_BUILDERS
    files = [
        str(recipe.locate(file, data=True)) if local and "://" not in file else file for file in dataset.data_files
    ]
    return HuggingFaceSource(
        dataset.path,
        name=dataset.name,
        split=dataset.split,
        data_files=files,
        revision=dataset.revision,
        text_column=dataset.text_column,
        streaming=dataset.streaming,
    )


def mix(sources: Sequence[TextSource], weights: Sequence[float], rng: random.Random) -> Iterator[str]:
    """Documents of all sources without end, each drawn from a source with a chance by its weight.

    A source that has come to its end begins another pass in another order.
    """
    streams = [_repeat(source, random.Random(rng.getrandbits(64))) for source in sources]
    while True:
        yield next(rng.choices(streams, weights)[0])


def _repeat(source: TextSource, rng: random.Random) -> Iterator[str]:
    while True:
        yield from source.documents(rng)


def pack(documents: Iterator[str], tokenizer: Tokenizer, sequence_len: int) -> Iterator[Tokens]:
    """Cuts the stream of tokens into sequences (sequence_len,); documents follow each other behind an end-of-text."""
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype=np.int32)
    rest = np.array([], dtype=np.int32)
    for document in documents:
        cuts = range(0, len(document), SEGMENT_BYTES)
        for tokens in chain((tokenizer.encode(document[cut : cut + SEGMENT_BYTES]) for cut in cuts), [end]):
            rest = np.concatenate([rest, tokens])
            whole = len(rest) - len(rest) % sequence_len
            yield from rest[:whole].reshape(-1, sequence_len)
            rest = rest[whole:]


def shuffle(sequences: Iterator[Tokens], size: int, rng: random.Random) -> Iterator[Tokens]:
    """Draws at random from a buffer of `size` sequences that is filled up as it is drawn from."""
    buffer: list[Tokens] = []
    for sequence in sequences:
        if len(buffer) < size:
            buffer.append(sequence.copy())  # a view would keep its whole segment alive
            continue
        place = rng.randrange(size)
        drawn, buffer[place] = buffer[place], sequence.copy()
        yield drawn
    rng.shuffle(buffer)
    yield from buffer


def batches(sequences: Iterator[Tokens], batch_size: int) -> Iterator[Batch]:
    """Micro-batches {"input_ids": (batch_size, sequence_len) int64}; a last one that is not full is left out."""
    rows: list[Tokens] = []
    for sequence in sequences:
        rows.append(sequence)
        if len(rows) == batch_size:
            yield {"input_ids": torch.from_numpy(np.stack(rows).astype(np.int64))}
            rows = []


def text_batches(recipe: Recipe, tokenizer: Tokenizer, seed: int) -> Iterator[Batch]:
    """One peer's endless stream of micro-batches, the same for the same seed. Raises DataError."""
    rng = random.Random(seed)
    sources = [open_source(recipe, dataset) for dataset in recipe.datasets]
    documents = mix(sources, [dataset.weight for dataset in recipe.datasets], rng)
    packed = pack(documents, tokenizer, recipe.sequence_len)
    shuffled = shuffle(packed, recipe.local.shuffle_buffer_size, random.Random(rng.getrandbits(64)))
    return batches(shuffled, recipe.micro_batch)
