"""From text to token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from swarmcli.errors import RecipeError
from swarmcli.recipe import Recipe

Tokens = npt.NDArray[np.int32]


class Tokenizer(Protocol):
    """What the data needs of a tokenizer."""

    vocab_size: int  # ids are below it
    end_of_text: int | None  # put behind each document, if there is such a token

    def encode(self, text: str) -> Tokens:
        """The ids of a text, without any that mark its beginning or end."""

    def decode(self, tokens: Tokens) -> str:
        """The text of ids; specials are left out."""


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


class SavedTokenizer:
    """A tokenizer that transformers' `save_pretrained` wrote into a directory."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Warnings about texts longer than the model do not apply: texts are cut into sequences afterwards.
        tokenizer.model_max_length = 1 << 62
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
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def decode(self, tokens: Tokens) -> str:
        return str(self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True))


def load_tokenizer(recipe: Recipe) -> Tokenizer:
    """The tokenizer that a recipe names. Raises RecipeError with the place in the file and the fix."""
    if recipe.tokenizer == "bytes":
        return ByteTokenizer()
    directory = recipe.locate(recipe.tokenizer)
    try:
        return SavedTokenizer.load(directory, trust_remote_code=recipe.local.trust_remote_code)
    except Exception as error:  # transformers and tokenizers raise many kinds, some of them plain Exception
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RecipeError(
            f"{recipe.origin('tokenizer')}: no tokenizer can be read from {directory} ({reason[:200]}); "
            "save one there with save_pretrained, or write `tokenizer: bytes`"
        ) from error
