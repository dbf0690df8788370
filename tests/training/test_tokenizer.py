from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.errors import RecipeError
from swarmcli.training import ByteTokenizer, SavedTokenizer, load_tokenizer

from .small_tasks import small


def save_word_tokenizer(directory: Path) -> Path:
    """A tokenizer of five words, saved as transformers does, made here without any download."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, "the": 1, "swarm": 2, "trains": 3, "<other>": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<other>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    # A tokenizer that frames each text: packing wants the bare tokens and puts the ends itself.
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<other>")
    fast.save_pretrained(directory)
    return directory


@given(st.text())
def test_bytes_come_back_as_the_text_they_were(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32 and (tokens < tokenizer.vocab_size).all()
    assert tokenizer.decode(tokens) == text


def test_half_characters_and_specials_do_not_stop_it() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("\ud800")) == "?"
    assert tokenizer.decode(np.array([104, 105, 256, 257, 258, 0xC3])) == "hi\ufffd"
    assert len({tokenizer.end_of_text, tokenizer.beginning_of_text, tokenizer.padding}) == 3


def test_a_saved_tokenizer_gives_bare_tokens(tmp_path: Path) -> None:
    tokenizer = SavedTokenizer.load(save_word_tokenizer(tmp_path))
    assert tokenizer.encode("the swarm trains").tolist() == [1, 2, 3]
    assert tokenizer.encode("the flock").dtype == np.int32
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (5, 0)
    assert tokenizer.decode(np.array([1, 2, 0])) == "the swarm"


def test_a_recipe_names_its_tokenizer(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(small(tmp_path)), ByteTokenizer)
    save_word_tokenizer(tmp_path / "words")
    assert load_tokenizer(small(tmp_path, "tokenizer=words")).vocab_size == 5


def test_a_directory_without_a_tokenizer_is_named_with_the_place_in_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"tokenizer=gone: no tokenizer can be read from .*gone is no directory"):
        load_tokenizer(small(tmp_path, "tokenizer=gone"))
    with pytest.raises(RecipeError, match="save one there with save_pretrained"):
        load_tokenizer(small(tmp_path, "tokenizer=texts"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(RecipeError, match="no tokenizer can be read from"):
        load_tokenizer(small(tmp_path, "tokenizer=broken"))
