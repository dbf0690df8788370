from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmcli.errors import DataError
from swarmcli.recipe import parse_recipe
from swarmcli.training import Batch, Compute, build_task, evaluate
from swarmcli.training.sources import USUAL, FileSource, HuggingFaceSource, Split

from .small_tasks import SMALL, small, write_rows

CPU = Compute(torch.device("cpu"))


def read(source: FileSource) -> list[str]:
    return [document.content for document in source.documents("seed")]


def words_of(source: FileSource) -> set[str]:
    return {word for text in read(source) for word in text.split() if len(word) == 7}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Many small files and a large one; every word is there once."""
    directory = tmp_path / "many"
    directory.mkdir()
    for number in range(200):
        (directory / f"{number:03}.txt").write_text(f"s{number:06} ")
    (directory / "large.txt").write_text("".join(f"l{number:06} " for number in range(20 * USUAL.held_out_bytes // 8)))
    return directory


def test_what_is_held_out_is_not_trained_on_and_all_else_is(texts: Path) -> None:
    everything = words_of(FileSource.below(texts))
    trained = words_of(FileSource.below(texts, split=Split(0.1, evaluates=False)))
    held_out = words_of(FileSource.below(texts, split=Split(0.1, evaluates=True)))
    assert not trained & held_out and trained | held_out == everything
    small_ones = sum(word.startswith("s") for word in held_out)
    assert 8 <= small_ones <= 35 and any(word.startswith("l") for word in held_out)
    # A stream of data knows when something else is held out.
    splits = (None, Split(0.1, evaluates=False), Split(0.2, evaluates=False))
    assert len({FileSource.below(texts, split=split).identity() for split in splits}) == 3


def test_what_is_held_out_follows_from_names_alone(texts: Path, tmp_path: Path) -> None:
    """Another computer has another version of the files, elsewhere, and perhaps not all of them."""
    other = tmp_path / "elsewhere" / "copy"
    other.mkdir(parents=True)
    for number in range(0, 200, 2):
        (other / f"{number:03}.txt").write_text(f"s{number:06} and more of it")
    here = {word for word in words_of(FileSource.below(texts, split=Split(0.1, evaluates=True))) if word[0] == "s"}
    there = words_of(FileSource.below(other, split=Split(0.1, evaluates=True)))
    assert there == {word for word in here if int(word[1:]) % 2 == 0}


def test_the_smallest_share_holds_out_something_and_of_one_small_file_or_row_nothing_can_be(texts: Path) -> None:
    source = FileSource.below(texts, split=Split(1e-9, evaluates=True))
    assert len(read(source)) == 1
    with pytest.raises(DataError, match=r"too little to hold some of it out.*remove evaluation\.held_out"):
        read(FileSource.below(texts / "000.txt", split=Split(0.5, evaluates=False)))
    row = write_rows(texts / "a.jsonl", {"text": "one"})
    few = HuggingFaceSource("json", data_files=[str(row)], held_out=Split(1e-9, evaluates=True))
    with pytest.raises(DataError, match=r"has no row that is held out; raise eval"):
        list(few.documents("seed"))


@pytest.mark.parametrize("streaming", [True, False])
def test_rows_are_held_out_by_their_content_however_they_are_read(tmp_path: Path, streaming: bool) -> None:
    rows = [{"text": f"row {number}", "label": number % 2} for number in range(200)]
    for name, order in (("a", rows), ("b", rows[::-1] + rows[:25])):
        write_rows(tmp_path / f"{name}.jsonl", *order)

    def texts_in(file: str, split: Split | None, column: str | None = "text") -> set[str]:
        source = HuggingFaceSource(
            "json", data_files=[str(tmp_path / file)], streaming=streaming, held_out=split, text_column=column
        )
        return {str(document.content) for document in source.documents("seed")}

    held, rest = Split(0.1, evaluates=True), Split(0.1, evaluates=False)
    everything = texts_in("a.jsonl", None)
    assert texts_in("a.jsonl", held) | texts_in("a.jsonl", rest) == everything
    assert not texts_in("a.jsonl", held) & texts_in("a.jsonl", rest) and 8 <= len(texts_in("a.jsonl", held)) <= 40
    assert texts_in("b.jsonl", held) == texts_in("a.jsonl", held)
    assert len(texts_in("a.jsonl", held, None)) + len(texts_in("a.jsonl", rest, None)) == 200


def held_out(texts: Path, *overrides: str) -> Any:
    text = SMALL.replace("texts", texts.name)
    return parse_recipe(text, ["evaluation.held_out=0.1", *overrides], name="small.yaml", directory=texts.parent)


def test_batches_are_the_same_for_everyone_and_no_more_than_asked_for(texts: Path) -> None:
    recipe = held_out(texts, "evaluation.samples=9")
    batches, again = (build_task(recipe).evaluation_batches() for _ in range(2))
    assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 2, 2, 1]
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(batches, again, strict=True))
    other = build_task(held_out(texts, "evaluation.samples=9", "seed=5", "local.shuffle_buffer_size=9"))
    assert torch.equal(other.evaluation_batches()[0]["input_ids"], batches[0]["input_ids"])


def test_of_one_recipe_no_batch_of_training_shows_what_evaluations_read(tmp_path: Path) -> None:
    directory, letters = tmp_path / "texts", range(40, 80)  # each file has a byte of its own
    directory.mkdir()
    for letter in letters:
        (directory / f"{letter}.txt").write_text(chr(letter) * 100)
    task = build_task(held_out(directory, "evaluation.held_out=0.3", "evaluation.samples=1000"))
    batches = task.batches(1)

    def letters_of(those: Iterable[Batch]) -> set[int]:
        return {*letters} & {*torch.cat([batch["input_ids"].flatten() for batch in those]).tolist()}

    kept, trained = letters_of(task.evaluation_batches()), letters_of(islice(batches, 130))  # more than one pass
    assert kept and trained == {*letters} - kept


def test_fewer_samples_where_there_is_no_more_text_and_an_error_where_there_is_none(tmp_path: Path) -> None:
    few = build_task(small(tmp_path, "evaluation.held_out=0.5")).evaluation_batches()
    assert 0 < sum(len(batch["input_ids"]) for batch in few) < 100
    with pytest.raises(DataError, match=r"shorter than one sequence of 512 tokens.*raise evaluation\.held_out"):
        build_task(small(tmp_path, "evaluation.held_out=0.5", "sequence_len=512")).evaluation_batches()


def test_a_dataset_that_shares_files_with_the_training_is_refused(tmp_path: Path) -> None:
    recipe = small(tmp_path, "evaluation.dataset={source: files, path: texts/a.txt}")
    with pytest.raises(DataError, match=r"evaluation\.dataset: 1 of its 1 files are trained on too, .*a\.txt"):
        build_task(recipe).evaluation_batches()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "d.txt").write_text("d" * 100)
    named = build_task(small(tmp_path, "evaluation.dataset={source: files, path: others}")).evaluation_batches()
    assert set(named[0]["input_ids"].flatten().tolist()) == {ord("d")}


def test_the_loss_is_the_mean_over_samples_without_dropout_and_leaves_the_model_as_it_was(texts: Path) -> None:
    recipe = held_out(texts, "evaluation.samples=3", "base_model.resid_pdrop=0.9")
    task = build_task(recipe)
    model = task.build_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batches = task.evaluation_batches()
    measured = evaluate(task, model, batches, CPU, lambda: False)
    assert measured is not None and measured.samples == 3
    model.eval()
    each = [task.loss(model, batch).item() for batch in batches]
    assert math.isclose(measured.loss, (2 * each[0] + each[1]) / 3, rel_tol=1e-6)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_an_evaluation_ends_between_two_batches_when_the_peer_leaves(texts: Path) -> None:
    task = build_task(held_out(texts))
    answers = iter([False, True])
    model = task.build_model()
    assert evaluate(task, model, task.evaluation_batches(), CPU, lambda: next(answers)) is None
    assert model.training
