"""Causal language modelling: predict the next token, with any decoder of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from swarmcli.errors import RecipeError
from swarmcli.recipe import AnyDataset, Recipe
from swarmcli.training.data import evaluation_batches, sample_stream
from swarmcli.training.models import ModelKind, ModelSource
from swarmcli.training.samples import SampleMaker, SampleStream, TextRun
from swarmcli.training.task import Batch
from swarmcli.training.tokenizer import load_tokenizer

CAUSAL = ModelKind(
    auto="AutoModelForCausalLM",
    listed="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    called="causal language models",
    usual=("gpt2", "gpt_neox", "llama", "mistral", "qwen3", "gemma", "phi3", "olmo2", "smollm3", "mamba"),
    loss_type="ForCausalLM",
)
_DECODERS = ("gpt_neox", "gpt_neox_japanese", "trocr")  # although their configs do not call them so
_BOTH_WAYS = ("flaubert", "xlm", "xlnet")  # whatever their configs say


class CausalLanguageModelling:
    """The task `causal_lm` of a recipe. A sample is a sequence of `sequence_len` tokens."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.tokenizer = load_tokenizer(recipe)
        self._models = ModelSource(
            recipe,
            CAUSAL,
            defaults={
                "vocab_size": self.tokenizer.vocab_size,
                "max_position_embeddings": recipe.sequence_len,
                "bos_token_id": self.tokenizer.end_of_text,
                "eos_token_id": self.tokenizer.end_of_text,
            },
            refuse=_reads_both_ways,
        )

    def build_model(self, *, outline: bool = False) -> nn.Module:
        """The model on the CPU in float32, as ModelSource builds it. Raises RecipeError too where it cannot hold the
        tokens."""
        model: Any = self._models.build(outline=outline)
        self._check_sizes(model.config)
        built: nn.Module = model
        return built

    def maker(self, datasets: Sequence[AnyDataset]) -> SampleMaker:
        """Makes samples of these, which follow each other cut wherever a sample is full."""
        return TextRun(self.tokenizer, self._recipe.sequence_len)

    def batches(self, seed: int, position: Mapping[str, Any] | None = None) -> SampleStream:
        return sample_stream(self._recipe, self.maker(self._recipe.datasets), seed, position)

    def evaluation_batches(self) -> list[Batch]:
        return evaluation_batches(self._recipe, self.maker)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean negative log likelihood in nats per token; the model shifts the labels itself."""
        loss: Tensor = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        return loss

    def save_preprocessing(self, directory: Path) -> None:
        self.tokenizer.save(directory)

    def _check_sizes(self, config: Any) -> None:
        if config.vocab_size < self.tokenizer.vocab_size:
            raise self._refuse(
                f"the model knows {config.vocab_size} tokens, the tokenizer has {self.tokenizer.vocab_size}",
                "raise vocab_size, or leave it out to have it follow the tokenizer",
                "vocab_size",
            )
        positions = getattr(config, "max_position_embeddings", None)
        if isinstance(positions, int) and positions < self._recipe.sequence_len:
            raise self._refuse(
                f"the model reads {positions} tokens at most, sequence_len is {self._recipe.sequence_len}",
                f"lower sequence_len to {positions}",
            )

    def _refuse(self, problem: str, fix: str, *keys: str) -> RecipeError:
        return RecipeError(f"{self._recipe.origin('base_model', *keys)}: base_model: {problem}; {fix}")


def _reads_both_ways(config: Any, is_decoder: bool | None) -> str | None:
    """Such a model would see the tokens that it is to predict."""
    name = config.model_type
    encoder = is_decoder is False and not config.is_encoder_decoder and name not in _DECODERS
    if encoder:
        return "set is_decoder: true to have it read one way, or "
    return "" if name in _BOTH_WAYS else None
