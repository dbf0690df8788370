from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.errors import DataError
from swarmcli.training import ByteTokenizer, build_task, stream_seed
from swarmcli.training.data import open_source
from swarmcli.training.samples import MixturePosition, SamplePosition, SampleStream, TextRun, mix, pack
from swarmcli.training.sources import Document, FileSource, HuggingFaceSource, Place

from .small_tasks import small


class ListSource:
    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.passes = 0

    def documents(self, seed: str, place: Place = ()) -> Iterator[Document]:
        self.passes += 1
        order = list(range(len(self.texts)))
        random.Random(seed).shuffle(order)
        (begin,) = place or (0,)
        for number in range(begin, len(order)):
            yield Document(self.texts[order[number]], True, (number + 1,))

    def identity(self) -> str:
        return "/".join(self.texts)


def numbered(texts: Iterable[str]) -> Iterator[tuple[Document, MixturePosition]]:
    """Documents with places, as `mix` gives them."""
    return ((Document(text, True, (n,)), MixturePosition(n, (0,), ((n,),))) for n, text in enumerate(texts, 1))


START = SamplePosition(MixturePosition.beginning(1), (), 0)


def stream(
    *sources: ListSource, position: Any = None, weights: list[float] | None = None, **changes: Any
) -> SampleStream:
    options = {"seed": 1, "batch_size": 2, "block": 8} | changes
    maker = TextRun(ByteTokenizer(), options.pop("sequence_len", 4))
    return SampleStream(sources, weights or [1.0] * len(sources), maker, position=position, **options)


def draw(made: SampleStream, count: int) -> list[list[int]]:
    return [row for batch in itertools.islice(made, count) for row in batch["input_ids"].tolist()]


@given(st.lists(st.text(max_size=30), max_size=8), st.integers(2, 9), st.integers(0, 60))
def test_packing_loses_only_the_last_rest_and_goes_on_where_it_was(texts: list[str], length: int, taken: int) -> None:
    tokenizer = ByteTokenizer()
    whole = [token for text in texts for token in [*tokenizer.encode(text).tolist(), 256]]
    packed = list(pack(numbered(texts), tokenizer, length, START))
    rows = [row.tolist() for row, *_ in packed]
    assert all(len(row) == length for row in rows)
    flat = [token for row in rows for token in row]
    assert flat == whole[: len(flat)] and len(whole) - len(flat) < length
    if taken < len(packed):
        where = packed[taken][1]
        assert len(where.rest) < length
        later = itertools.islice(numbered(texts), where.before.drawn, None)
        assert [row.tolist() for row, *_ in pack(later, tokenizer, length, where)] == rows[taken + 1 :]


def test_pieces_of_a_file_are_not_ended() -> None:
    documents = [
        (Document("ab", False, (1,)), MixturePosition(1, (0,), ((1,),))),
        (Document("cd", True, (2,)), MixturePosition(2, (0,), ((2,),))),
    ]
    (row, *_), *rest = pack(iter(documents), ByteTokenizer(), 5, START)
    assert row.tolist() == [97, 98, 99, 100, 256] and not rest


def test_a_huge_document_is_tokenized_in_pieces() -> None:
    longest = 0

    class Watching(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            nonlocal longest
            longest = max(longest, len(text))
            return super().encode(text)

    rows = list(pack(numbered(["x" * (3 << 20)]), Watching(), 1024, START))
    assert len(rows) == 3 * 1024 and longest <= 1 << 20


@pytest.mark.parametrize("block", [8, 7, 1000])
def test_a_pass_gives_each_sequence_once_and_the_next_has_another_order(block: int) -> None:
    made = stream(ListSource(*(f"{n:03}" for n in range(80))), block=block)  # a document is a sequence with its end
    passes = [[tuple(row) for row in draw(made, 40)] for _ in range(3)]
    assert all(len(set(drawn)) == 80 for drawn in passes)
    assert passes[0] != passes[1] != passes[2]
    assert next(made)["input_ids"].dtype == torch.int64


def test_sources_are_drawn_by_weight_and_repeated() -> None:
    often, seldom = ListSource("o", "o"), ListSource("s")
    mixed = mix([often, seldom], [3.0, 1.0], "1", MixturePosition.beginning(2))
    drawn = [document.content for document, _ in itertools.islice(mixed, 4000)]
    assert drawn.count("o") == pytest.approx(3000, abs=150)
    assert often.passes > 100 and seldom.passes > 100


@pytest.mark.parametrize("length", [4, 64])
@pytest.mark.parametrize("taken", [0, 3, 5, 101])
def test_a_stream_goes_on_where_another_one_was(length: int, taken: int) -> None:
    """Whatever lies across the border: a document, a block, a batch, a pass."""

    def sources() -> list[ListSource]:
        return [ListSource(*(f"{n} " * (n % 9) for n in range(40))), ListSource("a" * 50, "b" * 3)]

    whole = stream(*sources(), weights=[3.0, 1.0], sequence_len=length)
    draw(whole, taken)
    position = json.loads(json.dumps(whole.position()))
    expected = draw(whole, 50)
    assert draw(stream(*sources(), weights=[3.0, 1.0], sequence_len=length, position=position), 50) == expected
    again = stream(*sources(), weights=[3.0, 1.0], sequence_len=length, position=position)
    assert json.loads(json.dumps(again.position())) == position
    # Another block is for the next one; what was left of this one is what comes first.
    other = stream(*sources(), weights=[3.0, 1.0], sequence_len=length, position=position, block=5)
    left = 8 - position["block"][2]
    assert draw(other, 4)[:left] == expected[: min(left, 8)]


@pytest.mark.parametrize("changes", [{"data": "other"}, {"begin": {}}, {"choices": [[0]]}, {"block": [-1, 0, 0]}])
def test_a_position_that_cannot_be_or_is_of_other_data_is_refused(changes: dict[str, Any]) -> None:
    made = stream(ListSource("text"))
    next(made)
    with pytest.raises(ValueError):
        stream(ListSource("text"), position=made.position() | changes)
    for text, other in (("other text", {}), ("text", {"sequence_len": 5}), ("text", {"weights": [2.0]})):
        with pytest.raises(ValueError, match="of other data, or of another recipe"):
            stream(ListSource(text), position=made.position(), **other)


def test_peers_draw_unlike_streams_and_each_the_same_again(tmp_path: Path) -> None:
    recipe = small(tmp_path, "local.micro_batch_size=2")
    for n in range(30):
        (tmp_path / "texts" / f"{n}").write_text(f"{n:04}" * 40)

    def stream(peer: bytes) -> list[list[int]]:
        made = build_task(recipe).batches(stream_seed(recipe.seed, peer))
        return [batch["input_ids"].flatten().tolist() for batch in itertools.islice(made, 20)]

    assert stream(b"one") == stream(b"one") != stream(b"two")
    assert 0 <= stream_seed(recipe.seed, b"one") < 1 << 63  # as torch takes them


def test_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    recipe = small(tmp_path, "datasets.0.path=short.txt", "sequence_len=64")
    (tmp_path / "short.txt").write_text("a" * 63)  # and an end-of-text
    assert next(build_task(recipe).batches(0))["input_ids"].shape == (2, 64)
    (tmp_path / "short.txt").write_text("a" * 62)
    with pytest.raises(DataError, match="shorter than one sequence of 64 tokens; lower sequence_len"):
        next(build_task(recipe).batches(0))


def test_each_kind_of_dataset_has_its_source(tmp_path: Path) -> None:
    recipe = small(
        tmp_path,
        "datasets.1={source: stdlib}",
        "datasets.2={source: huggingface, path: json, data_files: [texts/a.jsonl, https://host/b.jsonl], field: t}",
        "datasets.3={source: huggingface, path: owner/name, name: en, split: test, data_files: [x.json], revision: v1}",
    )
    files, stdlib, local, hub = (open_source(recipe, dataset) for dataset in recipe.datasets)
    assert isinstance(files, FileSource) and len(files.files) == 3
    assert isinstance(stdlib, FileSource) and len(stdlib.files) > 300
    assert isinstance(local, HuggingFaceSource) and isinstance(hub, HuggingFaceSource)
    # Paths of local files begin beside the recipe; those of a dataset on the Hub are the Hub's.
    assert local._arguments["data_files"] == [str(tmp_path / "texts/a.jsonl"), "https://host/b.jsonl"]
    assert hub._arguments == {
        "name": "en", "split": "test", "data_files": ["x.json"], "revision": "v1", "streaming": True
    }  # fmt: skip


def test_a_directory_here_is_not_read_in_place_of_a_dataset_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small(tmp_path, "datasets.0={source: huggingface, path: Documents/letters}")
    monkeypatch.chdir(tmp_path)
    open_source(recipe, recipe.datasets[0])
    (tmp_path / "Documents" / "letters").mkdir(parents=True)
    with pytest.raises(DataError, match=r"Documents/letters exists on this computer.*another directory"):
        open_source(recipe, recipe.datasets[0])
