"""Masked language modelling: fill gaps in texts, with any encoder of transformers (Devlin et al., BERT, 3.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swarmcli.errors import RecipeError
from swarmcli.recipe import AnyDataset, Recipe
from swarmcli.training.chat import IGNORED
from swarmcli.training.models import ModelKind
from swarmcli.training.samples import Example, PlacedDocuments, PlacedSample, SampleMaker, SamplePosition, TextRun
from swarmcli.training.tasks.base import TextTask
from swarmcli.training.tokenizer import Tokenizer, Tokens, marks_of

# BERT's figures
_SHARE = 0.15  # the part of the tokens that the model has to predict; of these …
_MASKED = 0.8  # … show a mask, …
_REPLACED = 0.1  # … show any other token, and the rest show themselves


class MaskedRun(TextRun):
    """Samples {"input_ids", "labels": (sequence_len,) int64} of texts put one after the other, with gaps. Each text and
    each sample is between the marks that the tokenizer puts around a text.

    Gaps are drawn from the sample's tokens and the passes over the data. So each pass has other gaps, and a stream that
    goes on, or a further evaluation, has the same.
    """

    def __init__(self, tokenizer: Tokenizer, mask: int, sequence_len: int) -> None:
        self._begin, self._end = marks_of(tokenizer)
        super().__init__(tokenizer, sequence_len - len(self._begin) - len(self._end))
        self._marks = [], [*tokenizer.behind, *self._begin]
        self._mask = mask
        self._words = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.specials)

    def samples(self, documents: PlacedDocuments, where: SamplePosition) -> Iterator[PlacedSample]:
        for example, place, passes in super().samples(documents, where):
            tokens = np.concatenate([self._begin, example["input_ids"], self._end]).astype(np.int32)
            yield self._with_gaps(tokens, passes), place, passes

    def _with_gaps(self, tokens: Tokens, passes: Sequence[int]) -> Example:
        seed = hashlib.blake2b(repr(tuple(passes)).encode() + tokens.tobytes(), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(seed, "big"))
        places = np.flatnonzero(~np.isin(tokens, self._tokenizer.specials))  # none: nothing in it is learned
        gaps = rng.permutation(places)[: max(1, round(_SHARE * len(places)))]
        kinds = rng.random(len(gaps))
        shown = np.where(kinds < _MASKED, self._mask, tokens[gaps])
        other = kinds >= 1 - _REPLACED
        shown[other] = rng.choice(self._words, other.sum())
        labels, seen = np.full_like(tokens, IGNORED), tokens.copy()
        labels[gaps], seen[gaps] = tokens[gaps], shown
        return {"input_ids": seen, "labels": labels}

    def identity(self) -> Any:
        return ["masked", self._mask, super().identity()]


class MaskedLanguageModelling(TextTask):
    """The task `masked_lm` of a recipe. A sample is a sequence of `sequence_len` tokens."""

    kind = ModelKind(
        auto="AutoModelForMaskedLM",
        listed="MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        called="masked language models",
        usual=("albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta"),
        loss_type="ForMaskedLM",
    )
    measures = ("perplexity",)

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        if self.tokenizer.mask is None:
            raise RecipeError(
                f"{recipe.origin('tokenizer')}: tokenizer: it has no mask token to stand in gaps; take one of a masked "
                "model, or `tokenizer: bytes`"
            )
        self._mask = self.tokenizer.mask
        if recipe.sequence_len <= (marks := sum(map(len, marks_of(self.tokenizer)))):
            place = recipe.origin("sequence_len")
            raise RecipeError(f"{place}: sequence_len: {marks} tokens of each sample are marks; set more than those")

    def maker(self, datasets: Sequence[AnyDataset]) -> SampleMaker:
        return MaskedRun(self.tokenizer, self._mask, self.recipe.sequence_len)

    def save_preprocessing(self, directory: Path) -> None:
        self.tokenizer.save(directory, whole=True, gaps=True)
