"""A task that a package brings: every peer of a run with `task: bigrams` has this package installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from swarmcli.recipe import Recipe
from swarmcli.training import Batch, ByteTokenizer
from swarmcli.training.data import evaluation_batches, sample_stream
from swarmcli.training.samples import SampleStream, TextRun


class Bigrams:
    """Predicts each byte of a text from the one before it. The recipe's base_model is `{model_type: bigrams}`."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.tokenizer = ByteTokenizer()

    def build_model(self, *, outline: bool = False) -> nn.Module:
        model = nn.Embedding(self.tokenizer.vocab_size, self.tokenizer.vocab_size)  # byte → logits of the next one
        nn.init.zeros_(model.weight)  # peers begin with equal weights
        return model.to("meta") if outline else model

    def batches(self, seed: int, position: Mapping[str, Any] | None = None) -> SampleStream:
        return sample_stream(self.recipe, self._maker(), seed, position)

    def evaluation_batches(self) -> list[Batch]:
        return evaluation_batches(self.recipe, lambda datasets: self._maker())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        bytes_ = batch["input_ids"]  # (samples, sequence_len)
        logits = model(bytes_[:, :-1])  # (samples, sequence_len - 1, vocab_size)
        return nn.functional.cross_entropy(logits.flatten(0, 1), bytes_[:, 1:].flatten())

    def save_preprocessing(self, directory: Path) -> None:
        self.tokenizer.save(directory)

    def _maker(self) -> TextRun:
        return TextRun(self.tokenizer, self.recipe.sequence_len)
