"""Sequence classification: sort texts, or pairs of texts, with any such model of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from swarmcli.training.models import ModelKind
from swarmcli.training.samples import Example
from swarmcli.training.tasks.base import TextRowTask
from swarmcli.training.tasks.labels import LabelledTask


class SequenceClassification(LabelledTask, TextRowTask):
    """The task `sequence_classification` of a recipe. A sample is a text and its class; with `text_pair`, two texts.
    Texts are cut to `sequence_len` tokens."""

    kind = ModelKind(
        auto="AutoModelForSequenceClassification",
        listed="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        called="models that sort texts",
        usual=("albert", "bert", "deberta-v2", "distilbert", "electra", "gpt2", "modernbert", "roberta"),
    )
    columns, optional = ("text", "label"), ("text_pair",)

    def encode(self, row: Mapping[str, Any]) -> Example:
        pair = self.text_of(row, "text_pair") if "text_pair" in row else None
        inputs = self.tokenizer.encode_whole(self.text_of(row, "text"), pair, self.recipe.sequence_len)
        return {**inputs, "labels": np.asarray(self.number_of(row["label"]))}
