from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.errors import RecipeError
from swarmcli.training import ByteTokenizer
from swarmcli.training.tokenizer import SavedTokenizer, load_tokenizer

from .small_tasks import save_word_tokenizer, small


def test_half_characters_and_specials_do_not_stop_it() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("\ud800")) == "?"
    assert tokenizer.decode(np.array([104, 105, 256, 257, 258, 0xC3])) == "hi\ufffd"
    assert len({tokenizer.end_of_text, tokenizer.beginning_of_text, tokenizer.padding}) == 3


def test_a_saved_tokenizer_gives_bare_tokens_of_texts_of_any_length_and_is_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoTokenizer

    directory = save_word_tokenizer(tmp_path / "words")
    tokenizer = SavedTokenizer.load(directory)
    (tmp_path / "again").mkdir()
    tokenizer.save(tmp_path / "again")
    assert not [file for file in (tmp_path / "again").iterdir() if str(tmp_path) in file.read_text()]
    for each in (tokenizer, SavedTokenizer.load(tmp_path / "again")):
        assert each.encode("the swarm trains").tolist() == [1, 2, 3]
        assert each.encode("the flock").dtype == np.int32
        assert (each.vocab_size, each.end_of_text) == (5, 0)
        assert each.decode(np.array([1, 2, 0])) == "the swarm"
    loaded = AutoTokenizer.from_pretrained(str(directory), model_max_length=4)
    assert len(SavedTokenizer(loaded).encode("the swarm " * 10)) == 20
    assert "longer than" not in caplog.text and loaded.model_max_length == 4


@pytest.fixture(scope="module")
def saved_bytes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What transformers makes of the files that the byte tokenizer writes."""
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("bytes")
    ByteTokenizer().save(directory)
    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)


@given(
    text=st.text() | st.sampled_from(["<|end_of_text|>", "a <|padding|> b", " x  ,\r\n\t\0", "don't . !", "e\u0301 ﬁ"])
)
@settings(max_examples=100)
def test_saved_bytes_have_the_same_ids(saved_bytes: Any, text: str) -> None:
    ids = saved_bytes(text)["input_ids"]
    assert ids == ByteTokenizer().encode(text).tolist()
    assert saved_bytes.decode(ids) == text
    assert SavedTokenizer(saved_bytes).encode(text).tolist() == ids


@given(st.lists(st.integers(0, 258), max_size=40))
def test_any_ids_mean_the_same_to_saved_bytes(saved_bytes: Any, ids: list[int]) -> None:
    assert saved_bytes.decode(ids, skip_special_tokens=True) == ByteTokenizer().decode(np.array(ids, dtype=np.int32))


def test_saved_bytes_know_the_specials(saved_bytes: Any) -> None:
    ours = ByteTokenizer()
    assert saved_bytes.eos_token_id == ours.end_of_text
    assert saved_bytes.bos_token_id == ours.beginning_of_text
    assert saved_bytes.pad_token_id == ours.padding
    assert len(saved_bytes) == ours.vocab_size
    assert set(saved_bytes("text")) == {"input_ids", "attention_mask"}
    padded = saved_bytes(["a", "bcd"], padding=True)
    assert padded["input_ids"][0] == [97, 258, 258] and padded["attention_mask"][0] == [1, 0, 0]


def test_a_recipe_names_its_tokenizer_and_a_directory_without_one_is_refused_with_the_place(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(small(tmp_path)), ByteTokenizer)
    save_word_tokenizer(tmp_path / "words")
    assert load_tokenizer(small(tmp_path, "tokenizer=words")).vocab_size == 5
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for name, words in (
        ("gone", r"tokenizer=gone: no tokenizer can be read from .*gone is no directory"),
        ("texts", "save one there with save_pretrained"),
        ("broken", "no tokenizer can be read from"),
    ):
        with pytest.raises(RecipeError, match=words):
            load_tokenizer(small(tmp_path, f"tokenizer={name}"))
