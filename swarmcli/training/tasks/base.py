"""What all tasks that train models of transformers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from difflib import get_close_matches
from functools import cached_property
from itertools import chain
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from swarmcli.errors import RecipeError
from swarmcli.recipe import AnyDataset, HuggingFaceDataset, Recipe
from swarmcli.recipe.fingerprint import config_of
from swarmcli.recipe.pretrained import saved_model
from swarmcli.training.adapters import lacks_base
from swarmcli.training.chat import IGNORED, BadRow
from swarmcli.training.data import evaluation_batches, place_of, sample_stream
from swarmcli.training.device import Compute
from swarmcli.training.models import ModelKind, ModelSource
from swarmcli.training.samples import CountedRows, Example, RowByRow, SampleMaker, SampleStream, padded
from swarmcli.training.sources import Content
from swarmcli.training.task import Batch, PartChooser
from swarmcli.training.tokenizer import load_tokenizer
from swarmcli.words import listed

if TYPE_CHECKING:
    from torchmetrics import Metric

# Their models begin to count positions after the number of the padding token.
_BEHIND_PADDING = (
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "prophetnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
# They make longer tables of positions when needed, which must have a row for the padding token.
_ROW_OF_PADDING = ("m2m_100", "nllb-moe", "seamless_m4t", "seamless_m4t_v2", "xglm")

# These models read the padding after a text whatever the mask says, so their samples are always padded to
# `sequence_len`.
_SEE_PADDING = ("big_bird", "bigbird_pegasus", "canine", "convbert", "fnet", "funnel", "nystromformer", "yoso")

# These read their answer about a text at its last place, so padding comes before the text.
_READ_THE_LAST = ("xlnet",)


class ModelTask(ABC):
    """A task that trains a model of transformers, which computes its own loss."""

    kind: ModelKind  # each task has its own
    measures: tuple[str, ...]  # the metrics of its evaluations
    columns: tuple[str, ...] = ()  # columns of a row, by our names; none: the task reads texts, and not rows
    optional: tuple[str, ...] = ()  # columns that a dataset need not have
    smooths_labels = True

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._chooser: PartChooser | None = None
        self._check_columns()
        self._models = ModelSource(
            recipe, self.kind, defaults=self.defaults, decided=self.decided(), refuse=self.refuse
        )

    def defaults(self, usual: Any) -> dict[str, Any]:
        """Returns the fields of a config that a recipe may leave out: see ModelSource."""
        return {}

    def decided(self) -> dict[str, Any]:
        """Returns the fields of a config that other keys of the recipe decide."""
        return {}

    def refuse(self, config: Any, is_decoder: bool | None) -> str | None:
        """Refuses a config of an architecture that is listed: see ModelSource. None: the task can use it."""
        return None

    @abstractmethod
    def maker(self, datasets: Sequence[AnyDataset]) -> SampleMaker:
        """Returns the maker of samples for the rows of these datasets."""

    @abstractmethod
    def trial(self, length: int) -> Batch:
        """Returns a micro-batch of `length` tokens at most, or of images, for which no data is read: see
        `try_model`."""

    def try_model(self, model: Any, compute: Compute) -> None:
        """Computes a loss and its gradients once, and leaves the model as it was. Raises RecipeError if the model
        cannot compute. An adapter whose base is not there yet is not tried."""
        if lacks_base(model):
            return
        whole, count = self.recipe.sequence_len, sum(parameter.numel() for parameter in model.parameters())
        # With seven billion parameters 16 tokens take some seconds; with ten million a hundred tokens take one.
        short = min(whole, max(16, (1 << 30) // count))
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # a batch norm's means, for example
        failed: list[Exception] = []
        for length in sorted({short, whole}):  # some architectures read only whole sequences
            try:
                # Some architectures learn only from several samples at once.
                batch = {name: each[: self.recipe.micro_batch] for name, each in self.trial(length).items()}
                with compute.autocast():
                    loss = self.loss(model, compute.place(batch))
                loss.backward()
                return
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # architectures raise whatever they meet
                failed.append(error)
            finally:
                model.zero_grad()
                for buffer, before in buffers:
                    buffer.data.copy_(before)
        raise self._models.misfit("this model cannot compute", failed[0], model.config.to_dict()) from failed[0]

    def encoder(self, dataset: AnyDataset) -> CountedRows:
        """Returns what makes samples of the rows of a dataset; here, of texts that run together, every one teaches
        something."""
        return CountedRows(".".join(map(str, self.place_of(dataset))))

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        """Returns the model's outputs for a batch: `loss`, a scalar, and `logits`."""
        return model(**batch)

    def labels(self, batch: Batch) -> Tensor:
        """Returns what the model is to answer, (…); IGNORED: nothing."""
        return batch["labels"]

    def weight(self, batch: Batch) -> float:
        """See WeighsBatches: the number of labels that are learned. If each sample has one label, this is the number of
        samples."""
        return int((self.labels(batch) != IGNORED).sum())

    def answers(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the pair that metrics compare, (…, choices) and (…); IGNORED is not compared."""
        return logits, self.labels(batch)

    @property
    @abstractmethod
    def choices(self) -> int:
        """The size of the last dimension of the logits."""

    def metrics(self) -> dict[str, Metric]:
        """Metrics of logits (n, choices) and the right choices (n,)."""
        from swarmcli.training.metrics import metric_called

        return {name: metric_called(name, self.choices) for name in self.measures}

    def mean(self, losses: Tensor, learned: Tensor) -> Tensor:
        """Returns the mean of the losses of labels that are learned; both arguments are (…)."""
        return losses.where(learned, 0.0).sum() / learned.sum()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the model's own loss, in nats, with `label_smoothing_factor` as torch's cross_entropy has it."""
        outputs = self.outputs(model, batch)
        loss: Tensor = outputs.loss
        if smoothing := self.recipe.label_smoothing_factor:
            logits, labels = self.answers(outputs.logits, batch)
            # (1 - s)·(-log p of the label) + s·(mean of -log p) is the plain loss and this: softmax's norm cancels out.
            right = logits.gather(-1, labels.long().clamp(min=0).unsqueeze(-1)).squeeze(-1)
            loss = loss + smoothing * self.mean(right.float() - logits.mean(-1, dtype=torch.float32), labels != IGNORED)
        return loss

    def measure(self, model: nn.Module, batch: Batch, metrics: Mapping[str, Metric]) -> Tensor:
        """See MeasuredTask; labels are not smoothed."""
        outputs = self.outputs(model, batch)
        answers = self.answers(outputs.logits, batch)
        # One sample at a time: metrics make copies in float32, and logits over a vocabulary are large.
        for said, right in zip(*(each.split(1) for each in answers), strict=True):
            counted = right != IGNORED
            if counted.any():
                for metric in metrics.values():
                    metric.update(said[counted].float(), right[counted])
        loss: Tensor = outputs.loss
        return loss

    def build_model(self, *, outline: bool = False) -> nn.Module:
        """Returns the model on the CPU in float32, as ModelSource builds it. Also raises RecipeError if this machine's
        `micro_batch_size` would change what the model learns."""
        model, recipe = self._models.build(outline=outline), self.recipe
        if recipe.micro_batch != recipe.micro_batch_size and any(isinstance(m, _BatchNorm) for m in model.modules()):
            raise RecipeError(
                f"{recipe.origin('local', 'micro_batch_size')}: local.micro_batch_size: this model normalizes over a "
                f"micro-batch, so all peers need the recipe's, {recipe.micro_batch_size}; remove it"
            )
        return model

    def batches(self, seed: int, position: Mapping[str, Any] | None = None) -> SampleStream:
        maker = self.maker(self.recipe.datasets)
        return sample_stream(self.recipe, maker, seed, position, self._chooser, rows=bool(self.columns))

    def share(self, chooser: PartChooser) -> None:
        """See SharesPasses."""
        self._chooser = chooser

    def evaluation_batches(self) -> list[Batch]:
        return evaluation_batches(self.recipe, self.maker, rows=bool(self.columns))

    @abstractmethod
    def save_preprocessing(self, directory: Path) -> None:
        """See Task."""

    def _refuse(self, problem: str, fix: str, *keys: str) -> RecipeError:
        return RecipeError(f"{self.recipe.origin('base_model', *keys)}: base_model: {problem}; {fix}")

    def place_of(self, dataset: AnyDataset) -> tuple[str | int, ...]:
        """Returns where a dataset stands in the recipe."""
        return place_of(self.recipe, dataset)

    def _check_columns(self) -> None:
        """Refuses datasets without columns, and columns that the task does not read."""
        task, known = self.recipe.task, [*self.columns, *self.optional]
        renamed = [name for name in known if name != "text"]
        read: dict[tuple[str | int, ...], AnyDataset | None] = {
            ("datasets", index): dataset for index, dataset in enumerate(self.recipe.datasets)
        }
        for path, dataset in (read | {("evaluation", "dataset"): self.recipe.evaluation.dataset}).items():
            where = f"{self.recipe.origin(*path)}: {'.'.join(map(str, path))}"
            if not isinstance(dataset, HuggingFaceDataset):
                if known and dataset is not None:
                    raise RecipeError(
                        f"{where}: {dataset.source} gives texts, and {task} needs rows with {', '.join(known)}; name a "
                        "file of rows (path: data.jsonl) or a dataset of the Hub"
                    )
                continue
            if other := sorted(dataset.columns.keys() - renamed):
                near = get_close_matches(other[0], renamed, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it reads {', '.join(known)}" if known else "remove it"
                hint = "write `field: …` instead" if other[0] in known else hint
                raise RecipeError(f"{where}.columns: {task} reads no column called {other[0]}; {hint}")
            if known and "text" not in known and "field" in dataset.model_fields_set:
                raise RecipeError(f"{where}.field: {task} reads no single text; use `columns`")


class TextTask(ModelTask):
    """A task whose model reads the tokens of texts. A sample has at most `sequence_len` tokens."""

    pads = True  # samples have unlike lengths, or the model has to know the padding token for another reason

    def __init__(self, recipe: Recipe) -> None:
        self.tokenizer = load_tokenizer(recipe)
        super().__init__(recipe)

    def defaults(self, usual: Any) -> dict[str, Any]:
        """The special tokens of an architecture are those of the tokenizer."""
        padding, end = self.tokenizer.padding, self.tokenizer.end_of_text
        rows = padding + 1 if usual.model_type in (*_BEHIND_PADDING, *_ROW_OF_PADDING) else 0
        # Where nothing is padded, a padding token would only be a token that is not learned.
        fills = self.pads or (getattr(usual, "pad_token_id", None) is not None and (padding != end or rows > 0))
        further = {"mask_token_id": self.tokenizer.mask, "sep_token_id": end, "forced_eos_token_id": end}
        further["max_position_embeddings"] = self.recipe.sequence_len + rows
        return {
            "vocab_size": self.tokenizer.vocab_size,
            "bos_token_id": self.tokenizer.first,
            "eos_token_id": end,
            "pad_token_id": padding if fills else None,
            # XLNet writes -1 for any number of positions, and allows nothing else.
            **{k: v for k, v in further.items() if v is not None and getattr(usual, k, None) not in (None, -1)},
            **({"decoder_start_token_id": padding} if getattr(usual, "is_encoder_decoder", False) else {}),
        }

    def trial(self, length: int) -> Batch:
        tokens = torch.arange(2 * length).view(2, length) % self.tokenizer.vocab_size
        return {"input_ids": tokens, "labels": tokens}

    @property
    def choices(self) -> int:
        return self.tokenizer.vocab_size

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        kinds = getattr(getattr(model, "config", None), "type_vocab_size", 0)
        return model(**{name: tensor for name, tensor in batch.items() if name != "token_type_ids" or kinds > 1})

    def save_preprocessing(self, directory: Path) -> None:
        self.tokenizer.save(directory)

    def build_model(self, *, outline: bool = False) -> nn.Module:
        """See ModelTask. Also raises RecipeError if the model cannot hold the tokens."""
        model: Any = super().build_model(outline=outline)
        config = model.config.get_text_config()
        self._check_sizes(config)
        # a saved config may name no padding token, or another; a classifier looks for the last token that is not ours
        if self.pads:
            config.pad_token_id = self.tokenizer.padding
            if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
                config.decoder_start_token_id = self.tokenizer.padding
        built: nn.Module = model
        return built

    def _check_sizes(self, config: Any) -> None:
        words = getattr(config, "vocab_size", None)
        if isinstance(words, int) and words < self.tokenizer.vocab_size:
            known = f"the model knows {words} tokens, the tokenizer has {self.tokenizer.vocab_size}"
            if isinstance(self.recipe.base_model, Mapping):
                raise self._refuse(
                    known, "raise vocab_size, or leave it out to have it follow the tokenizer", "vocab_size"
                )
            if self.recipe.tokenizer:
                where = self.recipe.origin("tokenizer")
                raise RecipeError(f"{where}: tokenizer: {known}; remove tokenizer, to take the model's own")
            resized = f"save it with as many tokens, by its resize_token_embeddings({self.tokenizer.vocab_size})"
            raise self._refuse(known, resized)
        positions = getattr(config, "max_position_embeddings", None)
        if not isinstance(positions, int) or positions < 0:  # below 0: any number of positions
            return
        most = positions - self._before_positions(config.model_type, getattr(config, "pad_token_id", None))
        if most < self.recipe.sequence_len:
            raise self._refuse(
                f"the model reads {most} tokens at most, sequence_len is {self.recipe.sequence_len}",
                f"lower sequence_len to {most}",
            )

    @staticmethod
    def _before_positions(model_type: str, padding: int | None) -> int:
        return (padding or 0) + 1 if model_type in _BEHIND_PADDING else 0


class RowTask(ModelTask):
    """A task in which each sample is a row with `columns`. A row with an empty one (null), or one that cannot be read,
    is left out and counted."""

    @property
    def threads(self) -> int:
        """How many threads encode rows. With more than one, several call `encode` at a time."""
        return 1

    @abstractmethod
    def encode(self, row: Mapping[str, Any]) -> Example:
        """Makes the sample of a row, whose columns have our names. Raises BadRow that names the value."""

    @abstractmethod
    def collate(self, samples: Sequence[Example]) -> Batch:
        """See SampleMaker."""

    @abstractmethod
    def example(self, length: int) -> dict[str, Any]:
        """Returns a row of up to `length` tokens, for `trial`."""

    def trial(self, length: int) -> Batch:
        return self.collate([self.encode(self.example(each)) for each in (length, length // 2)])

    def maker(self, datasets: Sequence[AnyDataset]) -> SampleMaker:
        names = [self._names_of(dataset) for dataset in datasets]
        threads = self.threads
        # Nobody closes the pool: its threads end with the last of its encoders, and hold nothing while they idle.
        pool = ThreadPoolExecutor(threads, "swarm data") if threads > 1 else None
        encoders = [self.encoder(dataset, pool) for dataset in datasets]
        recipe = self.recipe
        identity = [recipe.task, list(recipe.labels), recipe.tokenizer, recipe.sequence_len, names]
        begun = 2 * threads if pool is not None else 0  # each thread has a row, and another one waits for it
        return RowByRow(encoders, self.collate, identity, begun)

    def _names_of(self, dataset: AnyDataset) -> dict[str, str]:
        """Returns our names for the columns of a dataset, each with the dataset's own."""
        assert isinstance(dataset, HuggingFaceDataset)
        own = {"text": dataset.field, **dataset.columns}
        return {name: own.get(name, name) for name in (*self.columns, *self.optional)}

    def encoder(self, dataset: AnyDataset, pool: Executor | None = None) -> CountedRows:
        """Returns what makes samples of the rows of a dataset; rows that it begins in `pool` are encoded side by
        side."""
        assert isinstance(dataset, HuggingFaceDataset)
        names = self._names_of(dataset)
        files = [PurePath(file).name for file in dataset.data_files] or [dataset.path]
        said = f"{'.'.join(map(str, self.place_of(dataset)))} ({listed(files, 1)})"

        def encode(content: Content) -> Iterator[Example]:
            assert isinstance(content, Mapping)
            for name in self.columns:
                if names[name] not in content:
                    key = "field: …" if name == "text" else f"columns: {{{name}: …}}"
                    there = ", ".join(sorted(content))
                    raise BadRow(
                        f"it has no column {names[name]!r} for {name}; it has {there}: name one of them by `{key}`"
                    )
            row = {name: content[names[name]] for name in names if names[name] in content}
            if bad := [value for value in row.values() if isinstance(value, BadRow)]:
                raise bad[0]
            if None not in row.values():
                example = self.encode(row)
                if all(array.size for array in example.values()) and (example["labels"] != IGNORED).any():
                    yield example

        def begin(content: Content) -> Iterator[Example]:
            assert pool is not None
            made = pool.submit(lambda: list(encode(content)))
            return chain.from_iterable(each.result() for each in (made,))

        return CountedRows(said, begin if pool is not None else encode, " (an empty column)")


class TextRowTask(RowTask, TextTask):
    """A task in which each sample is a row with texts."""

    def example(self, length: int) -> dict[str, Any]:
        text = self.tokenizer.decode(np.arange(length, dtype=np.int32) % self.tokenizer.vocab_size) or "a"
        label = next(iter(self.recipe.labels), None)
        return {"text": text, "source": text, "target": text, "label": label, "tokens": [text], "tags": [label]}

    def collate(self, samples: Sequence[Example]) -> Batch:
        fill = {"input_ids": self.tokenizer.padding, "attention_mask": 0, "token_type_ids": 0, "labels": IGNORED}
        first, least = samples[0], self.recipe.sequence_len if self._family in _SEE_PADDING else 0
        given = {name: value for name, value in fill.items() if name in first and first[name].ndim}
        return padded(samples, given, least, before=self._family in _READ_THE_LAST)

    @cached_property
    def _family(self) -> str:
        saved = saved_model(self.recipe)
        config: Any = self.recipe.base_model if saved is None else config_of(saved)
        return str(config.get("model_type"))

    def save_preprocessing(self, directory: Path) -> None:
        self.tokenizer.save(directory, whole=True)

    def text_of(self, row: Mapping[str, Any], name: str) -> str:
        text = row[name]
        if not isinstance(text, str):
            raise BadRow(f"{name} is {text!r:.80}, and should be text; name another column by `columns`")
        return text
