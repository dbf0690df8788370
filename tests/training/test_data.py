from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.errors import DataError
from swarmcli.training import ByteTokenizer, stream_seed
from swarmcli.training.data import batches, mix, open_source, pack, shuffle, text_batches
from swarmcli.training.sources import FileSource, HuggingFaceSource

from .small_tasks import small


class ListSource:
    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.passes = 0

    def documents(self, rng: random.Random) -> Iterator[str]:
        self.passes += 1
        yield from self.texts


def rows(count: int, length: int = 2) -> Iterator[np.ndarray]:
    return (np.full(length, n, dtype=np.int32) for n in range(count))


@given(st.lists(st.text(max_size=30), max_size=8), st.integers(min_value=2, max_value=9))
def test_packing_loses_only_the_last_rest(texts: list[str], length: int) -> None:
    tokenizer = ByteTokenizer()
    whole = [token for text in texts for token in [*tokenizer.encode(text).tolist(), 256]]
    packed = list(pack(iter(texts), tokenizer, length))
    assert all(row.shape == (length,) for row in packed)
    flat = [token for row in packed for token in row.tolist()]
    assert flat == whole[: len(flat)] and len(whole) - len(flat) < length


def test_packing_is_lazy_so_that_memory_stays_bounded() -> None:
    endless = pack(itertools.repeat("some text"), ByteTokenizer(), 16)
    assert len(list(itertools.islice(endless, 50))) == 50


def test_a_huge_document_is_tokenized_in_pieces() -> None:
    longest = 0

    class Watching(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            nonlocal longest
            longest = max(longest, len(text))
            return super().encode(text)

    rows = list(pack(iter(["x" * (3 << 20)]), Watching(), 1024))
    assert len(rows) == 3 * 1024 and longest <= 1 << 20


@given(st.integers(min_value=0, max_value=60), st.integers(min_value=1, max_value=20), st.integers())
def test_shuffling_loses_and_repeats_nothing(count: int, size: int, seed: int) -> None:
    drawn = [int(row[0]) for row in shuffle(rows(count), size, random.Random(seed))]
    assert sorted(drawn) == list(range(count))


def test_shuffling_holds_no_more_than_its_buffer() -> None:
    taken = 0

    def counted() -> Iterator[np.ndarray]:
        nonlocal taken
        for row in rows(1000):
            taken += 1
            yield row

    stream = shuffle(counted(), 10, random.Random(0))
    next(stream)
    assert taken == 11
    drawn = [int(row[0]) for row in itertools.islice(shuffle(rows(1000), 100, random.Random(0)), 500)]
    assert drawn != sorted(drawn)


def test_buffered_sequences_do_not_keep_their_segment_alive() -> None:
    segment = np.zeros((1000, 4), dtype=np.int32)
    drawn = itertools.islice(shuffle(iter(segment), 3, random.Random(0)), 20)
    assert all(row.base is None for row in drawn)


def test_batches_are_full_and_int64() -> None:
    made = list(batches(rows(7, length=3), 2))
    assert [batch["input_ids"].shape for batch in made] == [(2, 3)] * 3
    assert made[0]["input_ids"].dtype == torch.int64


def test_sources_are_drawn_by_weight_and_repeated() -> None:
    often, seldom = ListSource("o", "o"), ListSource("s")
    drawn = list(itertools.islice(mix([often, seldom], [3.0, 1.0], random.Random(1)), 4000))
    assert drawn.count("o") == pytest.approx(3000, abs=150)
    assert often.passes > 100 and seldom.passes > 100


def test_peers_draw_unlike_streams_and_each_the_same_again(tmp_path: Path) -> None:
    recipe = small(tmp_path)
    for n in range(30):
        (tmp_path / "texts" / f"{n}").write_text(f"{n:04}" * 40)

    def stream(peer: bytes) -> list[list[int]]:
        made = text_batches(recipe, ByteTokenizer(), stream_seed(recipe.seed, peer))
        return [batch["input_ids"].flatten().tolist() for batch in itertools.islice(made, 20)]

    assert stream(b"one") == stream(b"one")
    assert stream(b"one") != stream(b"two")


def test_seeds_of_streams_fit_torch_and_differ() -> None:
    seeds = {stream_seed(seed, peer) for seed in range(20) for peer in (b"a", b"b", b"")}
    assert len(seeds) == 60 and all(0 <= seed < 1 << 63 for seed in seeds)
    torch.manual_seed(max(seeds))


def test_the_batches_of_a_recipe_have_its_shapes(tmp_path: Path) -> None:
    recipe = small(tmp_path, "local.micro_batch_size=3")
    batch = next(text_batches(recipe, ByteTokenizer(), 0))
    assert batch["input_ids"].shape == (3, 16)


def test_missing_files_are_told_before_the_first_batch(tmp_path: Path) -> None:
    recipe = small(tmp_path, "datasets.0.path=gone")
    with pytest.raises(DataError, match="gone does not exist"):
        text_batches(recipe, ByteTokenizer(), 0)


def test_each_kind_of_dataset_has_its_source(tmp_path: Path) -> None:
    recipe = small(
        tmp_path,
        "datasets.1={type: stdlib}",
        "datasets.2={type: huggingface, path: json, data_files: [texts/a.jsonl, https://host/b.jsonl], text_column: t}",
        "datasets.3={type: huggingface, path: owner/name, name: en, split: test, data_files: [x.json], revision: v1}",
    )
    files, stdlib, local, hub = (open_source(recipe, dataset) for dataset in recipe.datasets)
    assert isinstance(files, FileSource) and len(files) == 3
    assert isinstance(stdlib, FileSource) and len(stdlib) > 300
    assert isinstance(local, HuggingFaceSource) and isinstance(hub, HuggingFaceSource)
    # Paths of local files begin beside the recipe; those of a dataset on the Hub are the Hub's.
    assert local._arguments["data_files"] == [str(tmp_path / "texts/a.jsonl"), "https://host/b.jsonl"]
    assert hub._arguments == {
        "name": "en", "split": "test", "data_files": ["x.json"], "revision": "v1", "streaming": True
    }  # fmt: skip
