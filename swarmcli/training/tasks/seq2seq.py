"""Sequence to sequence: turn a text into another, with any encoder and decoder of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from swarmcli.training.chat import IGNORED
from swarmcli.training.models import ModelKind
from swarmcli.training.samples import Example
from swarmcli.training.task import Batch
from swarmcli.training.tasks.base import TextRowTask

if TYPE_CHECKING:
    from torchmetrics import Metric


class SequenceToSequence(TextRowTask):
    """The task `seq2seq` of a recipe. A sample is two texts, each cut to `sequence_len` tokens."""

    kind = ModelKind(
        auto="AutoModelForSeq2SeqLM",
        listed="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        called="models that turn a text into another",
        usual=("bart", "marian", "mbart", "pegasus", "t5"),
    )
    measures = ("perplexity", "accuracy")
    written = "rouge_l"  # compares what the model writes: a pass for each token, so only if one peer evaluates for all
    columns = ("source", "target")

    def metrics(self) -> dict[str, Metric]:
        from swarmcli.training.metrics import metric_called

        alone = self.recipe.evaluation.evaluator is not None
        return super().metrics() | ({self.written: metric_called(self.written, 0)} if alone else {})

    def measure(self, model: nn.Module, batch: Batch, metrics: Mapping[str, Metric]) -> Tensor:
        loss = super().measure(model, batch, {name: each for name, each in metrics.items() if name != self.written})
        if self.written in metrics:
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            most = self.recipe.sequence_len  # as long as a target may be, whatever else is in the batch
            wrote = model.generate(**inputs, max_new_tokens=most, do_sample=False)  # type: ignore[operator]
            right = batch["labels"].masked_fill(batch["labels"] == IGNORED, self.tokenizer.padding)
            metrics[self.written].update(*([self._text(each) for each in texts.tolist()] for texts in (wrote, right)))
        return loss

    def _text(self, tokens: Sequence[int]) -> str:
        """Decodes an answer without the padding before it, and without all that follows its end."""
        end = {self.tokenizer.padding, self.tokenizer.end_of_text}
        text = takewhile(lambda token: token not in end, dropwhile(end.__contains__, tokens))
        return self.tokenizer.decode(np.fromiter(text, np.int32))

    def encode(self, row: Mapping[str, Any]) -> Example:
        length = self.recipe.sequence_len
        inputs = self.tokenizer.encode_whole(self.text_of(row, "source"), None, length)
        inputs.pop("token_type_ids", None)
        answer = self.tokenizer.encode_whole(self.text_of(row, "target"), None, length, target=True)
        return {**inputs, "labels": answer["input_ids"]}
