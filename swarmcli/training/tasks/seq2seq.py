"""Sequence to sequence: turn a text into another, with any encoder and decoder of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmcli.training.models import ModelKind
from swarmcli.training.samples import Example
from swarmcli.training.tasks.base import TextRowTask


class SequenceToSequence(TextRowTask):
    """The task `seq2seq` of a recipe. A sample is two texts, each cut to `sequence_len` tokens."""

    kind = ModelKind(
        auto="AutoModelForSeq2SeqLM",
        listed="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        called="models that turn a text into another",
        usual=("bart", "marian", "mbart", "pegasus", "t5"),
    )
    measures = ("perplexity", "accuracy")
    columns = ("source", "target")

    def defaults(self) -> dict[str, Any]:
        return {**super().defaults(), "decoder_start_token_id": self.tokenizer.padding}

    def encode(self, row: Mapping[str, Any]) -> Example:
        length = self.recipe.sequence_len
        inputs = self.tokenizer.encode_whole(self.text_of(row, "source"), None, length)
        inputs.pop("token_type_ids", None)
        return {**inputs, "labels": self.tokenizer.encode_whole(self.text_of(row, "target"), None, length)["input_ids"]}
