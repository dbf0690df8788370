"""Causal language modelling: predict the next token, with any decoder of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from swarmcli.recipe import AnyDataset
from swarmcli.training.models import ModelKind
from swarmcli.training.samples import SampleMaker, TextRun
from swarmcli.training.task import Batch
from swarmcli.training.tasks.base import TextTask

_DECODERS = ("gpt_neox", "gpt_neox_japanese", "trocr")  # although their configs do not call them so
_BOTH_WAYS = ("flaubert", "xlm", "xlnet")  # whatever their configs say


class CausalLanguageModelling(TextTask):
    """The task `causal_lm` of a recipe. A sample is a sequence of `sequence_len` tokens."""

    kind = ModelKind(
        auto="AutoModelForCausalLM",
        listed="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        called="causal language models",
        usual=("gpt2", "gpt_neox", "llama", "mistral", "qwen3", "gemma", "phi3", "olmo2", "smollm3", "mamba"),
        loss_type="ForCausalLM",
    )

    def refuse(self, config: Any, is_decoder: bool | None) -> str | None:
        """Refuses a model that would see the tokens that it is to predict."""
        name = config.model_type
        encoder = is_decoder is False and not config.is_encoder_decoder and name not in _DECODERS
        if encoder:
            return "set is_decoder: true to have it read one way, or "
        return "" if name in _BOTH_WAYS else None

    def maker(self, datasets: Sequence[AnyDataset]) -> SampleMaker:
        """Texts follow each other, cut wherever a sample is full."""
        return TextRun(self.tokenizer, self.recipe.sequence_len)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean negative log likelihood in nats per token; the model shifts the labels itself."""
        loss: Tensor = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        return loss
