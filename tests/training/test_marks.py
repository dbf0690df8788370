"""What tokenizers put around texts, and into them: samples have it as transformers' own call gives it."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, MBart50Tokenizer, PreTrainedTokenizerFast

from swarmcli.cli.generate import Conversation, Generation, write_on
from swarmcli.errors import RecipeError
from swarmcli.recipe import HuggingFaceDataset
from swarmcli.training import ByteTokenizer, build_task
from swarmcli.training.chat import IGNORED, ChatReader, TextReader
from swarmcli.training.samples import MixturePosition, SamplePosition, pack
from swarmcli.training.sources import DataOptions, Document
from swarmcli.training.tokenizer import SavedTokenizer

from . import test_row_tasks
from .small_tasks import LLAMA, TALK, family_tokenizer, write_rows

FAMILIES = ("bert", "gpt2", "llama3", "llama2")
WORDS = ["Anna", "lives", "in", "Oslo,", "don't", "she?"]


@pytest.fixture(scope="module")
def families() -> dict[str, Any]:
    return {family: family_tokenizer(family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_of_a_text_have_the_tokens_of_the_whole_and_its_marks_once(
    families: dict[str, Any], family: str
) -> None:
    theirs = families[family]
    texts = [" ".join(WORDS * 9), " ".join(reversed(WORDS * 5))]
    whole = [theirs(text)["input_ids"] for text in texts]
    end = theirs.eos_token_id
    right = [id for ids in whole for id in ([*ids, end] if end not in (None, ids[-1]) else ids)]

    def packed(length: int, where: SamplePosition) -> list[Any]:
        documents = ((Document(text, True, (n,)), MixturePosition(n, (0,), ((n,),))) for n, text in enumerate(texts, 1))
        later = itertools.islice(documents, where.before.drawn, None)
        return list(pack(later, SavedTokenizer(theirs), length, where, DataOptions(segment_bytes=40)))

    start = SamplePosition(MixturePosition.beginning(1), (), 0)
    assert [int(row[0]) for row, *_ in packed(1, start)] == right
    rows = packed(7, start)
    for n, (_, where, _) in enumerate(rows):
        assert [row.tolist() for row, *_ in packed(7, where)] == [row.tolist() for row, *_ in rows[n + 1 :]]


@pytest.mark.parametrize("family", FAMILIES)
def test_words_have_the_tokens_of_their_text_and_each_knows_its_first(families: dict[str, Any], family: str) -> None:
    theirs = families[family]
    words = ["", *WORDS[:3], " ", *WORDS[3:]]  # two of them vanish
    ids, of_words = SavedTokenizer(theirs).encode_words(words, 99)
    assert ids["input_ids"].tolist() == theirs(" ".join(WORDS))["input_ids"]
    spelled = {n: "" for n, word in enumerate(words) if word.strip()}
    for id, number in zip(ids["input_ids"], of_words, strict=True):
        if number is not None:
            spelled[number] += theirs.convert_ids_to_tokens(int(id)).strip("Ġ▁").removeprefix("##")
    assert [each.lower() for each in spelled.values()] == [word.lower() for word in WORDS]
    cut, of_cut = SavedTokenizer(theirs).encode_words(words, 5)
    assert len(cut["input_ids"]) == len(of_cut) == 5
    assert SavedTokenizer(theirs).encode_words(["", " "], 5)[1] == [None] * theirs.num_special_tokens_to_add()


@pytest.mark.parametrize("family", ["gpt2", "llama3", "llama2", "bytes"])
def test_a_model_goes_on_from_what_stood_before_a_text_in_training(
    families: dict[str, Any], family: str, tmp_path: Path
) -> None:
    ours: Any = ByteTokenizer() if family == "bytes" else SavedTokenizer(families[family])
    ours.save(tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(str(tmp_path))
    given: list[list[int]] = []

    def generate(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        given.append(input_ids[0].tolist())
        return input_ids

    def prompt(text: str, *, whole: bool = False) -> list[int]:
        model = SimpleNamespace(config=SimpleNamespace(), generate=generate)
        write_on(model, theirs, Generation(text, 9, 0.0, None, whole=whole), print)
        return given[-1]

    row = TextReader(ours)("Anna lives").tokens.tolist()
    assert [*prompt("Anna lives"), ours.end_of_text] == row
    assert row.count(theirs.bos_token_id) == (family.startswith("llama"))
    assert prompt("") == (row[:1] if family.startswith("llama") else row[-1:]), "as a text begins, behind another"
    if family == "llama3":  # the template writes the beginning itself, in training and here
        theirs.chat_template = LLAMA
        item = HuggingFaceDataset(path="chats.jsonl", type="chat_template")
        chat = ChatReader(theirs, item, None)({"messages": TALK[:2]}).tokens.tolist()
        turn = prompt(Conversation(theirs, "", raw=False).prompt(str(TALK[0]["content"])), whole=True)
        assert chat[: len(turn)] == turn and chat.count(theirs.bos_token_id) == 1


BERT = "{model_type: bert, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16}"


def masked(directory: Path, *overrides: str) -> Any:
    write_rows(directory / "rows.jsonl", *({"text": " ".join(WORDS[n % 3 :])} for n in range(30)))
    return build_task(test_row_tasks.recipe_for("masked_lm", BERT, directory, "sequence_len=40", *overrides))


@pytest.mark.parametrize("family", ["gpt2", "llama3"])
def test_a_new_model_knows_where_texts_of_its_tokenizer_begin_and_end(
    families: dict[str, Any], family: str, tmp_path: Path
) -> None:
    theirs = families[family]
    theirs.save_pretrained(tmp_path / "words")
    task = masked(tmp_path, "task=causal_lm", "base_model.model_type=llama", "tokenizer=words")
    config = task.build_model(outline=True).config
    assert (config.bos_token_id, config.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


@pytest.mark.parametrize("family", ["bert", "bytes"])
def test_samples_with_gaps_are_marked_as_fill_mask_marks_its_texts(
    families: dict[str, Any], family: str, tmp_path: Path
) -> None:
    families["bert"].save_pretrained(tmp_path / "bert")
    task = masked(tmp_path, f"tokenizer={family}")
    (tmp_path / "saved").mkdir()
    task.save_preprocessing(tmp_path / "saved")
    theirs: Any = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    texts = [theirs(" ".join(WORDS[n:]))["input_ids"] for n in range(3)]  # with their marks
    begin, end = texts[0][0], texts[0][-1]
    assert begin != end and {begin, end} < set(theirs.all_special_ids)
    whole = 0
    for batch in itertools.islice(task.batches(1), 20):
        gaps = batch["labels"] != IGNORED
        right = batch["input_ids"].where(~gaps, batch["labels"])
        assert right.shape == (8, 40) and (right[:, 0] == begin).all() and (right[:, -1] == end).all()
        assert not np.isin(batch["labels"], theirs.all_special_ids).any()
        shown = batch["input_ids"][gaps]
        assert not np.isin(shown[shown != theirs.mask_token_id], theirs.all_special_ids).any()
        for row in right.tolist():
            inner = [n for n, id in enumerate(row) if id == begin]
            for first, behind in itertools.pairwise(inner[1:]):
                whole += row[first:behind] in texts
                assert row[first:behind] in texts
    assert whole or family == "bytes"
    ids = theirs(f"Anna {theirs.mask_token} in")["input_ids"]
    assert ids[0] == begin and ids.count(theirs.mask_token_id) == 1
    with pytest.raises(RecipeError, match="sequence_len: 2 tokens of each sample are marks; set more"):
        masked(tmp_path, f"tokenizer={family}", "sequence_len=2")


def test_an_answer_is_marked_as_the_target_of_a_translation() -> None:
    words = [(word, 0.0) for word in ("<s>", "<pad>", "</s>", "<unk>", "▁hello", "▁salut")]
    theirs = MBart50Tokenizer(vocab=words, src_lang="en_XX", tgt_lang="fr_XX")
    for text, target in (("hello", False), ("salut", True)):
        ids = SavedTokenizer(theirs).encode_whole(text, None, 9, target=target)["input_ids"].tolist()
        assert ids == theirs(**{"text_target" if target else "text": text})["input_ids"]
        assert theirs.convert_ids_to_tokens(ids[:1]) == ["fr_XX" if target else "en_XX"]


def test_a_vocabulary_with_holes_is_as_large_as_its_largest_number() -> None:
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a")))
    assert len(tokenizer) == 2 and SavedTokenizer(tokenizer).vocab_size == 8
