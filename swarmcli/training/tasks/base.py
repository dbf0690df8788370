"""The part that all tasks of transformers share; a task is what is left."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from swarmcli.errors import RecipeError
from swarmcli.recipe import AnyDataset, Recipe
from swarmcli.training.data import evaluation_batches, sample_stream
from swarmcli.training.models import ModelKind, ModelSource
from swarmcli.training.samples import SampleMaker, SampleStream
from swarmcli.training.task import Batch, Reading
from swarmcli.training.tokenizer import load_tokenizer


class TextTask(ABC):
    """A task whose model reads the tokens of texts. A sample has at most `sequence_len` tokens."""

    kind: ModelKind  # each task has its own

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.tokenizer = load_tokenizer(recipe)
        self._reading: Reading | None = None
        self._models = ModelSource(recipe, self.kind, defaults=self.defaults(), refuse=self.refuse)

    def defaults(self) -> dict[str, Any]:
        """The fields of a config that a recipe may leave out, as transformers calls them for all architectures."""
        return {
            "vocab_size": self.tokenizer.vocab_size,
            "max_position_embeddings": self.recipe.sequence_len,
            "bos_token_id": self.tokenizer.end_of_text,
            "eos_token_id": self.tokenizer.end_of_text,
        }

    def refuse(self, config: Any, is_decoder: bool | None) -> str | None:
        """Refuses a config of an architecture that is listed: see ModelSource. None: the task can use it."""
        return None

    @abstractmethod
    def maker(self, datasets: Sequence[AnyDataset]) -> SampleMaker:
        """Makes samples of the rows of these datasets."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """See Task."""

    def build_model(self, *, outline: bool = False) -> nn.Module:
        """The model on the CPU in float32, as ModelSource builds it. Raises RecipeError too where it cannot hold the
        tokens."""
        model: Any = self._models.build(outline=outline)
        self._check_sizes(model.config.get_text_config())
        built: nn.Module = model
        return built

    def batches(self, seed: int, position: Mapping[str, Any] | None = None) -> SampleStream:
        return sample_stream(self.recipe, self.maker(self.recipe.datasets), seed, position, self._reading)

    def share(self, reading: Reading) -> None:
        """See SharesPasses."""
        self._reading = reading

    def evaluation_batches(self) -> list[Batch]:
        return evaluation_batches(self.recipe, self.maker)

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
        if isinstance(positions, int) and positions < self.recipe.sequence_len:
            raise self._refuse(
                f"the model reads {positions} tokens at most, sequence_len is {self.recipe.sequence_len}",
                f"lower sequence_len to {positions}",
            )

    def _refuse(self, problem: str, fix: str, *keys: str) -> RecipeError:
        return RecipeError(f"{self.recipe.origin('base_model', *keys)}: base_model: {problem}; {fix}")
