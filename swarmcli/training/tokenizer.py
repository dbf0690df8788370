"""From text to token ids."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from swarmcli.errors import RecipeError
from swarmcli.recipe import Recipe
from swarmcli.recipe.pretrained import saved_tokenizer
from swarmcli.words import first_words

Tokens = npt.NDArray[np.int32]


class Tokenizer(Protocol):
    """The data needs no more of a tokenizer than this."""

    vocab_size: int  # ids are below it
    end_of_text: int | None  # put behind each document, if there is such a token

    def encode(self, text: str) -> Tokens:
        """The ids of a text, without any that mark its beginning or end."""

    def decode(self, tokens: Tokens) -> str:
        """The text of ids; specials are left out."""

    def save(self, directory: Path) -> None:
        """Writes the files from which transformers' AutoTokenizer makes it, without code of ours. Raises OSError."""

    def of_transformers(self) -> Any:
        """The same tokenizer as transformers has it: for chat templates."""


class ByteTokenizer:
    """Every byte of UTF-8 is a token; behind them come three specials."""

    end_of_text: int | None = 256
    beginning_of_text = 257
    padding = 258
    vocab_size = 259

    def encode(self, text: str) -> Tokens:
        # "surrogatepass" would write bytes that are no UTF-8; a lone surrogate becomes a question mark instead.
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.int32)

    def decode(self, tokens: Tokens) -> str:
        return bytes(token for token in np.asarray(tokens).tolist() if token < 256).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> None:
        """The same ids for every text: a BPE without merges, whose 256 symbols are numbered as the bytes they stand
        for."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in _byte_symbols().items()}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        specials = {"eos_token": "<|end_of_text|>", "bos_token": "<|beginning_of_text|>", "pad_token": "<|padding|>"}
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials.values()])
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **specials,
            # A text that spells a special token was bytes in training, and stays bytes.
            "split_special_tokens": True,
            "clean_up_tokenization_spaces": False,
            # GPT-2 would add an embedding for token_type_ids, and others refuse them.
            "model_input_names": ["input_ids", "attention_mask"],
        }
        (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def of_transformers(self) -> Any:
        from transformers import AutoTokenizer

        with TemporaryDirectory() as directory:
            self.save(Path(directory))
            return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def _byte_symbols() -> dict[int, str]:
    """The printable character that stands for each byte in the library's ByteLevel: itself in Latin-1 where that is
    printable, otherwise the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


class SavedTokenizer:
    """A tokenizer that transformers' `save_pretrained` wrote into a directory."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = max(len(tokenizer), 1)
        self.end_of_text: int | None = tokenizer.eos_token_id

    @classmethod
    def load(cls, directory: Path, *, trust_remote_code: bool = False) -> SavedTokenizer:
        """Reads local files only. Raises OSError or ValueError when they are not a tokenizer's."""
        from transformers import AutoTokenizer

        if not directory.is_dir():
            raise OSError(f"{directory} is no directory")
        return cls(
            AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=trust_remote_code, use_fast=True
            )
        )

    def encode(self, text: str) -> Tokens:
        # Not verbose: texts are longer than the model reads, because they are cut into sequences afterwards.
        return np.asarray(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)

    def decode(self, tokens: Tokens) -> str:
        return str(self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True))

    def save(self, directory: Path) -> None:
        self._tokenizer.save_pretrained(str(directory))

    def of_transformers(self) -> Any:
        return self._tokenizer


def load_tokenizer(recipe: Recipe) -> Tokenizer:
    """The tokenizer that a recipe names. Raises RecipeError with the place in the file and the fix."""
    saved = saved_tokenizer(recipe)
    if saved is None:
        return ByteTokenizer()
    directory = saved.directory()
    try:
        return SavedTokenizer.load(directory, trust_remote_code=recipe.local.trust_remote_code)
    except Exception as error:  # transformers and tokenizers raise many kinds, some of them plain Exception
        raise RecipeError(
            f"{recipe.origin('tokenizer')}: no tokenizer can be read from {directory} ({first_words(error)}); "
            "save one there with save_pretrained, or write `tokenizer: bytes`"
        ) from error
