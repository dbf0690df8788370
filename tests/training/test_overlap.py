"""How much two peers share of what they read first, and that a pass over the data reads each row once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from swarmcli.training import ByteTokenizer
from swarmcli.training.samples import SampleStream, TextRun
from swarmcli.training.sources import USUAL, DataOptions, FileSource, HuggingFaceSource, TextSource

ROWS, FIRST = 2_000, 100
MOST = FIRST / ROWS + 0.1  # independent draws share 5%, give or take 2
PEERS = 6
BLOCK = 1536


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 2,000 rows of 31 characters as files of several kinds."""
    directory = tmp_path_factory.mktemp("data")
    rows = datasets.Dataset.from_dict({"text": [f"{n:05} {'x' * 25}" for n in range(ROWS)]})
    rows.to_parquet(str(directory / "one.parquet"))
    rows.to_json(str(directory / "one.jsonl"))
    for number in range(16):
        rows.shard(16, number, contiguous=True).to_parquet(str(directory / f"shard{number:02}.parquet"))
    (directory / "one.txt").write_text("\n".join(rows["text"]) + "\n")
    return directory


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def of(kind: str, pattern: str, *, streaming: bool = True) -> Callable[..., HuggingFaceSource]:
    def make(data: Path, options: DataOptions = USUAL) -> HuggingFaceSource:
        files = sorted(str(file) for file in data.glob(pattern))
        return HuggingFaceSource(kind, data_files=files, streaming=streaming, options=options)

    return make


SOURCES = {
    "shards, streamed": of("parquet", "shard*.parquet"),
    "one JSON file, streamed": of("json", "one.jsonl"),
    "one file, downloaded": of("json", "one.jsonl", streaming=False),
}


def overlaps(streams: list[set[str]]) -> list[float]:
    return [len(one & other) / FIRST for one, other in itertools.combinations(streams, 2)]


@pytest.mark.parametrize("name", SOURCES)
def test_two_peers_share_no_more_than_independent_draws(data: Path, name: str) -> None:
    source = SOURCES[name](data)

    def first(peer: int) -> set[str]:
        return {document.content for document in itertools.islice(source.documents(f"peer {peer}"), FIRST)}

    streams = [first(peer) for peer in range(PEERS)]
    assert all(len(rows) == FIRST for rows in streams)
    shared = overlaps(streams)
    assert max(shared) <= MOST, sorted(shared)
    assert sum(shared) / len(shared) == pytest.approx(FIRST / ROWS, abs=0.03)


def test_two_peers_share_no_more_of_the_sequences_of_one_text_file(data: Path) -> None:
    source = FileSource.below(data / "one.txt")

    def first(peer: int) -> set[str]:
        made = stream(source, peer)
        return {str(batch["input_ids"].tolist()) for batch in itertools.islice(made, FIRST)}

    shared = overlaps([first(peer) for peer in range(PEERS)])
    assert max(shared) <= MOST, sorted(shared)


def stream(source: TextSource, seed: int = 1, position: object = None) -> SampleStream:
    """A row with its end is a sequence of 32 tokens, and a batch."""
    options: Any = {"seed": seed, "batch_size": 1, "block": BLOCK, "position": position}
    return SampleStream([source], [1.0], TextRun(ByteTokenizer(), 32), **options)


def texts(made: SampleStream, count: int) -> Iterator[str]:
    for batch in itertools.islice(made, count):
        yield ByteTokenizer().decode(batch["input_ids"][0].numpy())


@pytest.mark.parametrize("name", ["shards, streamed", "one file, downloaded"])
def test_restarted_at_any_place_a_pass_reads_each_row_once(data: Path, name: str) -> None:
    windows = DataOptions(window_rows=300)  # several of them, as of data that is larger
    position, read, count = None, Counter[str](), 0
    for length in (70, 1, 400, BLOCK - 471, 250, ROWS - BLOCK - 250):  # on a block's border, too
        made = stream(SOURCES[name](data, windows), position=position)  # another process with a source of its own
        read.update(texts(made, length))
        count += length
        position = made.position()
        assert len(read) == count and max(read.values()) == 1
    assert len(read) == ROWS
    second = list(texts(made, ROWS))
    assert len(set(second)) == ROWS and second[:100] != list(itertools.islice(read, 100))
