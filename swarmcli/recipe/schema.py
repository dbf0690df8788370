"""The recipe as one typed value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, PrivateAttr, StringConstraints, field_validator, model_validator

from swarmcli.recipe.dataset import ChatTemplate, Dataset
from swarmcli.recipe.document import RecipeEntry
from swarmcli.recipe.patterns import check_pattern
from swarmcli.recipe.rules import conflicts_in, without_meaning
from swarmcli.recipe.section import REQUIRED, Conflict, Section, advised, own, shared
from swarmcli.recipe.settings import (
    AveragingSettings,
    CheckpointSettings,
    CompressionSettings,
    DelaySettings,
    EvaluationSettings,
    GradientAveragingSettings,
    KeyText,
    LocalSettings,
    LocalUpdateSettings,
    NetworkSettings,
    OptimizerSettings,
    OuterSettings,
    OwnPath,
    SchedulerSettings,
    beside,
)
from swarmcli.recipe.task_names import BUILT_IN, check_task

TaskName = Annotated[str, AfterValidator(check_task)]
LabelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Setting: TypeAlias = str | Sequence[Any]  # `key=value` as somebody typed it, or a key and the value of an option
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


# Modules are named one by one: peft takes a text as a pattern, so a volunteer who joins by a link would match a
# stranger's patterns, and some take years.
Modules = Annotated[tuple[Annotated[str, StringConstraints(min_length=1, max_length=200)], ...], Field(max_length=256)]
_LORA = {"adapter": ["lora"]}
_TEXTS = {"task": [name for name, task in BUILT_IN.items() if task.texts]}


class Recipe(Section):
    """A whole recipe. Made by `load_recipe`; paths of `own` fields are absolute, others as they were written."""

    run_id: str = shared(
        REQUIRED, "the run's name: up to 64 letters, digits, dots, dashes, underscores", pattern=f"^{RUN_ID.pattern}$"
    )
    access: Literal["open", "invite"] = shared("open", "open: whoever has a link; invite: whoever is invited")
    run_key: KeyText | None = shared(None, "public half of the owner's key, from `swarm init`")
    task: TaskName = shared("causal_lm", "what is learned")
    base_model: Mapping[str, Any] | str = shared(
        REQUIRED, "a config of transformers, a directory, or owner/name on the Hub"
    )
    revision: str | None = shared(None, "commit of a base_model of the Hub", max_length=200)
    unfrozen_parameters: tuple[str, ...] = shared(
        (), "patterns for names of trained parameters; []: all", max_length=64
    )
    frozen_weights: str | None = shared(
        None, "digest of the frozen weights, from `swarm validate`", pattern="^[0-9a-f]{64}$"
    )
    adapter: Literal["lora"] | None = shared(None, "lora: train an adapter beside a frozen base")
    lora_r: int = shared(8, "rank of the two matrices", of=_LORA, ge=1, le=1024)
    lora_alpha: float = shared(16, "scale, divided by the rank", of=_LORA, gt=0)
    lora_dropout: float = shared(0.0, "dropout of their input", of=_LORA, ge=0, lt=1)
    lora_target_modules: Modules | Literal["all-linear"] | None = shared(
        None, "ends of module names, or all-linear; null: peft's choice", of=_LORA
    )
    lora_modules_to_save: Modules | None = shared(None, "modules that are trained whole", of=_LORA)
    peft_use_rslora: bool = shared(False, "divide lora_alpha by the root of the rank", of=_LORA)
    peft_layers_to_transform: tuple[int, ...] | None = shared(
        None, "numbers of the layers with an adapter; null: all", of=_LORA, max_length=1024
    )
    load_in_8bit: bool = shared(False, "hold the base in 8 bits", of=_LORA)
    load_in_4bit: bool = shared(False, "hold the base in 4 bits", of=_LORA)
    quantized_by: str | None = shared(
        None,
        "the package that quantizes, name==version, from `swarm validate`",
        of=_LORA,
        pattern="^(torchao|bitsandbytes)==[0-9][0-9A-Za-z.+-]{0,40}$",
    )
    tokenizer: str | None = shared(
        None, "bytes, a directory, or owner/name; null: the saved model's, else bytes", of=_TEXTS, min_length=1
    )
    tokenizer_revision: str | None = shared(None, "commit of a tokenizer of the Hub", max_length=200)
    datasets: tuple[Dataset, ...] = shared(REQUIRED, "what the model reads", min_length=1)
    chat_template: ChatTemplate | None = shared(None, "chatml or a Jinja template; null: the tokenizer's")
    labels: tuple[LabelName, ...] = shared(
        (),
        "names of the classes",
        of={"task": [name for name, task in BUILT_IN.items() if task.labelled]},
        max_length=100_000,
    )
    sequence_len: int = shared(0, "tokens per sample", of=_TEXTS, ge=2, le=1 << 20)
    sample_packing: bool = shared(False, "several rows in a sample, kept apart", of={"task": ["causal_lm"]})
    target_batch_size: int = shared(REQUIRED, "samples of all peers per epoch", ge=1)
    micro_batch_size: int = advised(8, "samples per forward pass", ge=1)
    gradient_accumulation_steps: int = advised(1, "forward passes per report of progress", ge=1)
    gradient_checkpointing: bool = advised(False, "recompute activations: a third slower, far less memory")
    label_smoothing_factor: float = shared(0.0, "share of each label, spread over all", ge=0, lt=1)
    ema_decay: float = shared(0.0, "of averaged weights, per epoch; 0: none", ge=0, lt=1)
    val_set_size: float = shared(0.0, "evaluation.held_out, by axolotl's name", ge=0, le=0.5)
    seed: int = shared(0, "of initial weights and the order of data", ge=0, lt=1 << 63)
    max_epochs: int | None = shared(None, "the last epoch; null: until stopped", ge=1)
    license: str | None = advised(None, "for the model card", max_length=64)
    language: tuple[LabelName, ...] = advised((), "for the model card", max_length=64)
    tags: tuple[LabelName, ...] = advised((), "for the model card", max_length=32)
    output_dir: OwnPath = own(Path("runs"), "journals, checkpoints, keys", validate_default=True)
    optimizer: OptimizerSettings = OptimizerSettings()
    lr_scheduler: SchedulerSettings = SchedulerSettings()
    averaging: AveragingSettings = AveragingSettings()
    gradient_averaging: GradientAveragingSettings = GradientAveragingSettings()
    delay: DelaySettings = DelaySettings()
    local_updates: LocalUpdateSettings = LocalUpdateSettings()
    outer: OuterSettings = OuterSettings()
    compression: CompressionSettings = CompressionSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    network: NetworkSettings = NetworkSettings()
    local: LocalSettings = LocalSettings()

    _text: str = PrivateAttr("")
    _root: RecipeEntry = PrivateAttr(default_factory=lambda: RecipeEntry({}, "recipe"))
    _directory: Path = PrivateAttr(default_factory=Path.cwd)
    _file: str = PrivateAttr("")
    _overrides: tuple[Setting, ...] = PrivateAttr(())

    @field_validator("base_model", mode="before")
    @classmethod
    def _config_or_directory(cls, value: Any) -> Any:
        if not isinstance(value, Mapping | str) or not value:
            raise ValueError(
                "write a transformers config below it (`model_type: gpt2` …), or beside it a directory or owner/name"
            )
        return value

    @field_validator("unfrozen_parameters")
    @classmethod
    def _patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_pattern, patterns))

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if found := [*without_meaning(self), *conflicts_in(self)]:
            raise Conflict(*found)
        return self

    @property
    def file(self) -> str:
        """The recipe file as it was named."""
        return self._file

    @property
    def overrides(self) -> tuple[Setting, ...]:
        """The settings that stand beside the file."""
        return self._overrides

    @property
    def notes(self) -> tuple[str, ...]:
        """Advice, each with its line and what to write: about an evaluation that would come only after the end of the
        run."""
        every, end = self.evaluation.every_epochs, self.max_epochs
        if not end or every <= end:
            return ()
        said = f"evaluation.every_epochs is {every}, and the run ends at {end}: nothing is evaluated; lower it"
        return (f"{self.origin('evaluation', 'every_epochs')}: {said}",)

    @property
    def source(self) -> tuple[str, tuple[Setting, ...], str, str]:
        """What `parse_recipe` made this recipe of: text, overrides, name and directory."""
        return self._text, self._overrides, self._file, str(self._directory)

    @property
    def directory(self) -> Path:
        """Where the recipe file lies; relative paths begin here."""
        return self._directory

    def locate(self, text: str, *, data: bool = False) -> Path:
        """Returns the absolute path of what a shared field holds; `data` for files of datasets."""
        return beside((self.local.data_dir if data else None) or self._directory, text)

    def origin(self, *path: str | int) -> str:
        """Returns `file:line` of a value, or of the nearest one that is written above it: for messages."""
        here = self._root
        for key in path:
            below = here.child(key)
            if below is None:
                break
            here = below
        return here.origin

    @property
    def way(self) -> Literal["gradients", "local updates", "outer steps"]:
        """What the peers average: gradients, parameters that each peer steps by itself, or how far each went from an
        anchor."""
        return "outer steps" if self.outer.optimizer else "local updates" if self.local_updates.enabled else "gradients"

    @property
    def trust(self) -> Literal["strangers", "members"]:
        """Whether the members of a group may lie to each other, or only fail."""
        return self.averaging.trust or ("members" if self.access == "invite" else "strangers")

    @property
    def aggregator(self) -> str:
        """The name of the aggregator, which makes an average of the members' parts."""
        strangers = self.trust == "strangers" and self.gradient_averaging.method == "plain"
        return self.averaging.aggregator.name or ("centered_clip" if strangers else "mean")

    @property
    def held_out(self) -> float:
        """The share of all datasets that is kept for evaluations."""
        return self.val_set_size or self.evaluation.held_out

    @property
    def micro_batch(self) -> int:
        """Samples per forward pass on this machine."""
        return self.local.micro_batch_size or self.micro_batch_size

    @property
    def offloaded(self) -> bool:
        """Whether the optimizer of a trainer on this machine lives in host memory."""
        return self.local.offload_optimizer or self.delay.step

    @property
    def accumulation_steps(self) -> int:
        """Forward passes per step on this machine."""
        return self.local.gradient_accumulation_steps or self.gradient_accumulation_steps
