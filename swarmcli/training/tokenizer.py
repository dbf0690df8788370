"""Turns text into token ids, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from swarmcli.errors import RecipeError
from swarmcli.recipe import Recipe
from swarmcli.recipe.pretrained import saved_tokenizer
from swarmcli.words import first_words

Tokens = npt.NDArray[np.int32]
Encoded: TypeAlias = dict[str, Tokens]  # a model's inputs, each (tokens,): input_ids, attention_mask …


class Tokenizer(Protocol):
    """What training needs of a tokenizer."""

    vocab_size: int  # ids are below it
    end_of_text: int | None  # the last of `behind`, if there is such a token
    first: int | None  # a text that a model writes from nothing begins after it
    before: Sequence[int]  # ids that stand before each text that a model continues …
    behind: Sequence[int]  # … and after each one
    specials: Sequence[int]  # ids that stand for no text

    padding: int  # fills up the shorter samples of a batch
    mask: int | None  # stands in the gaps that a model fills, if there is such a token

    def encode(self, text: str) -> Tokens:
        """The ids of a text, without any that mark its beginning or end."""

    def encode_whole(self, text: str, pair: str | None, length: int, *, target: bool = False) -> Encoded:
        """Returns the tokens of a text, or of two, with what marks their beginnings and ends, cut to `length` tokens;
        `target`: marked as a model's answer, with its language for example."""

    def encode_words(self, words: Sequence[str], length: int) -> tuple[Encoded, list[int | None]]:
        """The same for words, with a space between two of them; also returns for each token the number of its word (a
        space belongs to the word after it; None: no word). Raises ValueError where the tokenizer cannot tell."""

    def decode(self, tokens: Tokens) -> str:
        """Returns the text of ids, without specials."""

    def save(self, directory: Path, *, whole: bool = False, gaps: bool = False) -> None:
        """Writes the files from which transformers' AutoTokenizer loads it, without code of ours; `whole`: so that it
        marks beginnings and ends as `encode_whole` does; `gaps`: so that it finds the mask in a text. Raises
        OSError."""

    def of_transformers(self) -> Any:
        """The same tokenizer as transformers has it: for chat templates."""


class ByteTokenizer:
    """Each byte of UTF-8 is a token; three specials have the numbers after them."""

    mask: int | None = 0xFF  # UTF-8 has no such byte
    end_of_text: int | None = 256
    beginning_of_text = 257
    padding = 258
    first: int | None = 256  # it also stands between texts
    before: Sequence[int] = ()
    behind: Sequence[int] = (256,)
    specials: Sequence[int] = (0xFF, 256, 257, 258)
    vocab_size = 259

    def encode(self, text: str) -> Tokens:
        # "surrogatepass" would write bytes that are no UTF-8; a lone surrogate becomes a question mark instead.
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.int32)

    def encode_whole(self, text: str, pair: str | None, length: int, *, target: bool = False) -> Encoded:
        first, second = self.encode(text), self.encode(pair or "")
        room = length - (2 if pair is None else 3)
        second = second[: max(room // 2, room - len(first))]
        parts: list[Any] = [[self.beginning_of_text], first[: room - len(second)], [self.end_of_text]]
        parts += [] if pair is None else [second, [self.end_of_text]]
        return _encoded(input_ids=np.concatenate(parts)[:length])

    def encode_words(self, words: Sequence[str], length: int) -> tuple[Encoded, list[int | None]]:
        text, of_words = _joined(words)
        numbers = [of_words[n] for n, character in enumerate(text) for _ in self.encode(character)]
        return self.encode_whole(text, None, length), [None, *numbers[: length - 2], None]

    def decode(self, tokens: Tokens) -> str:
        return bytes(token for token in np.asarray(tokens).tolist() if token < 0xFF).decode("utf-8", errors="replace")

    def save(self, directory: Path, *, whole: bool = False, gaps: bool = False) -> None:
        """Saved as a BPE without merges that gives the same ids for every text: its symbols have the numbers of their
        bytes."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers.convert_slow_tokenizer import bytes_to_unicode  # as ByteLevel writes each byte

        mask = "<|mask|>"
        vocab = {symbol if byte != self.mask else mask: byte for byte, symbol in bytes_to_unicode().items()}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        specials = {"eos_token": "<|end_of_text|>", "bos_token": "<|beginning_of_text|>", "pad_token": "<|padding|>"}
        tokenizer.add_special_tokens([mask, *specials.values()])
        if whole:
            begin, end = specials["bos_token"], specials["eos_token"]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{begin} $A {end}",
                pair=f"{begin} $A {end} $B {end}",
                special_tokens=[(begin, self.beginning_of_text), (end, self.end_of_text)],
            )
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **specials,
            "mask_token": mask,
            # In training, a text that spells a special token was bytes, and it stays bytes; but the mask shows where a
            # gap is.
            "split_special_tokens": not gaps,
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


def _encoded(**inputs: Any) -> Encoded:
    """Adds the attention mask: nothing is padding yet."""
    return {
        **{name: np.asarray(each, dtype=np.int32) for name, each in inputs.items()},
        "attention_mask": np.ones(len(inputs["input_ids"]), np.int32),
    }


def marks_of(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the ids that `encode_whole` puts before and after a text."""
    bare, whole = tokenizer.encode("a").tolist(), tokenizer.encode_whole("a", None, 64)["input_ids"].tolist()
    begin = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    return whole[:begin], whole[begin + len(bare) :]


def _joined(words: Sequence[str]) -> tuple[str, list[int | None]]:
    """Returns words as one text, without words of white space alone, and for each character the number of its word; the
    end of the text has None."""
    pieces = [f" {word.strip()}" if word.strip() else "" for word in words]
    return "".join(pieces)[1:], [*[n for n, piece in enumerate(pieces) for _ in piece][1:], None]


class SavedTokenizer:
    """A tokenizer that transformers' `save_pretrained` wrote into a directory."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = max(tokenizer.get_vocab().values(), default=0) + 1  # added tokens may leave numbers out
        self.end_of_text: int | None = tokenizer.eos_token_id
        self.first: int | None = next((n for n in (tokenizer.bos_token_id, self.end_of_text) if n is not None), None)
        self.mask: int | None = tokenizer.mask_token_id
        self.specials = tokenizer.all_special_ids
        begin, end = marks_of(self)
        self.before: Sequence[int] = begin
        self.behind: Sequence[int] = [*end, *({self.end_of_text} - {None, *end})]
        self.padding: int = next((n for n in (tokenizer.pad_token_id, self.end_of_text) if n is not None), 0)

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
        # Not verbose, or it would warn of texts longer than the model reads; they are cut into sequences later.
        return np.asarray(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)

    def encode_whole(self, text: str, pair: str | None, length: int, *, target: bool = False) -> Encoded:
        texts = {"text_target": text} if target else {"text": text, "text_pair": pair}
        return _encoded_by(self._tokenizer(**texts, truncation=True, max_length=length))

    def encode_words(self, words: Sequence[str], length: int) -> tuple[Encoded, list[int | None]]:
        if not self._tokenizer.is_fast:
            raise ValueError("it cannot tell which word a token is of")
        # transformers' is_split_into_words would leave out the spaces, which byte-level BPE needs.
        text, of_words = _joined(words)
        made = self._tokenizer(text, truncation=True, max_length=length, return_offsets_mapping=True)
        begins = zip(made["offset_mapping"], made.sequence_ids(), strict=True)
        return _encoded_by(made), [None if number is None else of_words[begin] for (begin, _), number in begins]

    def decode(self, tokens: Tokens) -> str:
        return str(self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True))

    def save(self, directory: Path, *, whole: bool = False, gaps: bool = False) -> None:
        self._tokenizer.save_pretrained(str(directory))

    def of_transformers(self) -> Any:
        return self._tokenizer


def _encoded_by(made: Any) -> Encoded:
    return _encoded(**{name: made[name] for name in ("input_ids", "token_type_ids") if name in made})


def load_tokenizer(recipe: Recipe) -> Tokenizer:
    """Returns the tokenizer that a recipe names. Raises RecipeError with the place in the file and the fix."""
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
