"""Token classification: label the words of texts, with any such model of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from swarmcli.errors import RecipeError
from swarmcli.recipe import Recipe
from swarmcli.training.chat import IGNORED, BadRow
from swarmcli.training.models import ModelKind
from swarmcli.training.samples import Example
from swarmcli.training.tasks.base import TextRowTask
from swarmcli.training.tasks.labels import LabelledTask


class TokenClassification(LabelledTask, TextRowTask):
    """The task `token_classification` of a recipe. A sample is the words of a text, cut to `sequence_len` tokens; the
    first token of each word has the word's label."""

    kind = ModelKind(
        auto="AutoModelForTokenClassification",
        listed="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        called="models that label words",
        usual=("albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta"),
    )
    columns = ("tokens", "tags")

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        try:
            self.tokenizer.encode_words(["a"], recipe.sequence_len)
        except ValueError as error:
            raise RecipeError(
                f"{recipe.origin('tokenizer')}: tokenizer: {error}; take a fast one, or `tokenizer: bytes`"
            ) from error

    def encode(self, row: Mapping[str, Any]) -> Example:
        words, tags = row["tokens"], row["tags"]
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise BadRow(f"tokens is {words!r:.80}, and should be a list of words")
        if not isinstance(tags, list) or len(tags) != len(words):
            raise BadRow(f"tags is {tags!r:.80}, and should be a list with one label for each of {len(words)} words")
        inputs, of_words = self.tokenizer.encode_words(words, self.recipe.sequence_len)
        # IGNORED: data may mark words without a label so
        numbers = [IGNORED if tag == IGNORED else self.number_of(tag) for tag in tags]
        firsts = [word if word not in of_words[:place] else None for place, word in enumerate(of_words)]
        labels = [IGNORED if word is None else numbers[word] for word in firsts]
        return {**inputs, "labels": np.asarray(labels, dtype=np.int32)}
