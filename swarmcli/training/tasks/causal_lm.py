"""Causal language modelling: predict the next token, with any decoder of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmcli.errors import RecipeError
from swarmcli.recipe import AnyDataset, HuggingFaceDataset, Recipe
from swarmcli.recipe.dataset import CHAT_KEYS
from swarmcli.training.chat import IGNORED, ChatReader, RowEncoder, TextReader
from swarmcli.training.models import ModelKind
from swarmcli.training.samples import CountedRows, Packs, RowByRow, SampleMaker, TextRun, padded
from swarmcli.training.task import Batch, samples_in
from swarmcli.training.tasks.base import TextTask

_DECODERS = ("gpt_neox", "gpt_neox_japanese", "trocr")  # decoders although their configs do not say so
_BOTH_WAYS = ("flaubert", "xlm", "xlnet")  # they read both ways, whatever their configs say
_PADS_IN_FRONT = ("cpmant",)  # takes token 0 for padding, also inside a text
# Their losses compare the answer at a token with the label at that place, not with the next one.
_LABELS_IN_PLACE = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus",
    "plbart", "prophetnet", "trocr", "whisper",
)  # fmt: skip


class CausalLanguageModelling(TextTask):
    """The task `causal_lm` of a recipe. A sample is a sequence of `sequence_len` tokens of texts that run together. If
    a dataset has another type than `text`, or with `sample_packing`, a sample is a row, or several rows that are kept
    apart."""

    kind = ModelKind(
        auto="AutoModelForCausalLM",
        listed="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        called="causal language models",
        usual=("gpt2", "gpt_neox", "llama", "mistral", "qwen3", "gemma", "phi3", "olmo2", "smollm3", "mamba"),
        loss_type="ForCausalLM",
    )
    measures = ("perplexity",)
    pads = False

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        named = recipe.evaluation.dataset
        self._readers = [(item, self._reader(item)) for item in (*recipe.datasets, *([named] if named else []))]

    def refuse(self, config: Any, is_decoder: bool | None) -> str | None:
        """Refuses a model that would see the tokens that it has to predict."""
        name = config.model_type
        encoder = is_decoder is False and not config.is_encoder_decoder and name not in _DECODERS
        if encoder:
            return "set is_decoder: true to have it read one way, or "
        return "" if name in (*_BOTH_WAYS, *_PADS_IN_FRONT) else None

    def maker(self, datasets: Sequence[AnyDataset]) -> SampleMaker:
        """Texts are put one after the other and cut wherever a sample is full; rows are not, if a dataset has them."""
        length, packing = self.recipe.sequence_len, self.recipe.sample_packing
        if not self.reads_rows(datasets):
            return TextRun(self.tokenizer, length)
        encoders = [self.encoder(dataset) for dataset in datasets]
        fill = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED, **({"position_ids": 0} if packing else {})}
        rows = RowByRow(
            encoders,
            partial(padded, fill=fill),
            [self.tokenizer.vocab_size, length, *map(self._identity, datasets)],
        )
        return Packs(rows, length) if packing else rows

    def reads_rows(self, datasets: Sequence[AnyDataset] = ()) -> bool:
        """Whether a sample is one row or several; otherwise texts run together."""
        items = (*self.recipe.datasets, *datasets)
        return self.recipe.sample_packing or any(item.type != "text" for item in items)

    def encoder(self, dataset: AnyDataset) -> CountedRows:
        if not self.reads_rows([dataset]):
            return super().encoder(dataset)
        return RowEncoder(".".join(map(str, self.place_of(dataset))), self._of(dataset), self.recipe.sequence_len)

    def build_model(self, *, outline: bool = False) -> nn.Module:
        """See TextTask. Also raises RecipeError if rows are packed and this architecture would not keep them apart."""
        model = super().build_model(outline=outline)
        if self.recipe.sample_packing and not outline and not _keeps_apart(model):
            name = model.config.model_type  # type: ignore[union-attr]
            raise RecipeError(
                f"{self.recipe.origin('sample_packing')}: sample_packing: a {name} model does not keep the rows of a "
                "sample apart; remove it, or take a model that does, for example llama or gpt2"
            )
        return model

    def trial(self, length: int) -> Batch:
        batch = super().trial(length)
        return batch if self.reads_rows() else {"input_ids": batch["input_ids"]}

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        """The loss is the model's own: the mean over the tokens that are learned, and what its routers add."""
        config: Any = model.config
        labels = batch.get("labels", batch["input_ids"])
        if config.model_type in _LABELS_IN_PLACE:
            labels = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        # Padding comes after all that is learned, so only routers, which count tokens, need a mask that hides it. With
        # a mask transformers would not tell packed rows apart by their positions.
        routed = getattr(config, "output_router_logits", False) and not self.recipe.sample_packing
        inputs = {name: tensor for name, tensor in batch.items() if name != "attention_mask" or routed}
        return model(**{**inputs, "labels": labels})

    def labels(self, batch: Batch) -> Tensor:
        return batch.get("labels", batch["input_ids"])[:, 1:]

    def weight(self, batch: Batch) -> float:
        """The number of samples, if texts run together, since then each sample has equally many tokens; otherwise the
        number of labels that are learned."""
        return super().weight(batch) if "labels" in batch else samples_in(batch)

    def answers(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return logits[:, :-1], self.labels(batch)

    def save_preprocessing(self, directory: Path) -> None:
        """Saves the tokenizer, with the template by which the model has learned."""
        chat = next((reader for _, reader in self._readers if isinstance(reader, ChatReader)), None)
        if chat is None:
            super().save_preprocessing(directory)
        else:
            chat.save(directory)

    def _reader(self, dataset: AnyDataset) -> TextReader | ChatReader:
        if not isinstance(dataset, HuggingFaceDataset) or dataset.type != "chat_template":
            return TextReader(self.tokenizer)
        template = dataset.chat_template or self.recipe.chat_template
        place = self.place_of(dataset)
        try:
            called = f"{self.recipe.origin(*place)}: {'.'.join(map(str, place))}"
            return ChatReader(self.tokenizer.of_transformers(), dataset, template, called)
        except ValueError as error:
            key = (*place, "chat_template") if dataset.chat_template else ("chat_template",) if template else place
            raise RecipeError(f"{self.recipe.origin(*key)}: {'.'.join(map(str, key))}: {error}") from error

    def _of(self, dataset: AnyDataset) -> TextReader | ChatReader:
        return next(reader for item, reader in self._readers if item is dataset)

    def _identity(self, dataset: AnyDataset) -> Any:
        return [self._of(dataset).template, dataset.model_dump(mode="json", include={"type", *CHAT_KEYS})]


@torch.no_grad()
def _keeps_apart(model: Any) -> bool:
    """Whether a row changes nothing for the next row in the same sample."""
    length = 4  # tokens of each of two rows
    ids = torch.arange(2 * length)[None] % model.config.vocab_size
    others = torch.where(torch.arange(2 * length) < length, ids.flip(1), ids)
    positions = torch.arange(length).repeat(2)[None]
    was_training = model.training
    model.eval()
    try:
        one, other = (model(input_ids=each, position_ids=positions).logits[:, length:] for each in (ids, others))
    except Exception:  # an architecture that takes no positions says so in its own way
        return False
    finally:
        model.train(was_training)
    # The 17 of 31 architectures that keep rows apart differ by 2e-7 of their largest logit at most, the others by 1e-3
    # at least.
    return bool((one - other).abs().max() < 1e-4 * one.abs().max())
