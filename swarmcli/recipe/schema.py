"""The recipe as one typed value, and the rules that concern several of its sections at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, PrivateAttr, StringConstraints, field_validator, model_validator

from swarmcli.recipe.adapters import check_adapter
from swarmcli.recipe.dataset import AnyDataset, ChatTemplate, Dataset, HuggingFaceDataset
from swarmcli.recipe.document import RecipeEntry
from swarmcli.recipe.optimizers import OPTIMIZERS
from swarmcli.recipe.patterns import check_pattern
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
from swarmcli.recipe.task_names import BUILT_IN, check_task, task_in_words

TaskName = Annotated[str, AfterValidator(check_task)]
LabelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
# The first pages of the Hub are no owners of models; `models/NAME` is how links name a directory.
HUB_NAME = re.compile(r"(?!(models|datasets|spaces)/)[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Recipe(Section):
    """A whole recipe. Made by `load_recipe`; paths of `own` fields are absolute, others as they were written."""

    run_id: str = shared(
        REQUIRED,
        "the name of the run: up to 64 letters, digits, dots, dashes, underscores",
        pattern=f"^{RUN_ID.pattern}$",
    )
    access: Literal["open", "invite"] = shared(
        "open", "open: whoever has a link takes part; invite: whom the run's owner has invited"
    )
    run_key: KeyText | None = shared(
        None,
        "the public half of the owner's key, which signs invitations and positions of the run; `swarm init` makes it",
    )
    task: TaskName = shared("causal_lm", "what is learned; see [tasks](#tasks)")
    base_model: Mapping[str, Any] | str = shared(
        REQUIRED,
        "a transformers config (`model_type` and its fields), a directory with a saved model, or owner/name on the "
        "Hugging Face Hub, with revision",
    )
    revision: str | None = shared(
        None, "the commit (40 hexadecimal digits) of a base_model of the Hub, and of its tokenizer", max_length=200
    )
    unfrozen_parameters: tuple[str, ...] = shared(
        (),
        "regular expressions for the beginnings of the names of trained parameters; []: all are trained",
        max_length=64,
    )
    frozen_weights: str | None = shared(
        None,
        "the digest of the weights that are not trained; `swarm validate` tells it",
        pattern="^[0-9a-f]{64}$",
    )
    adapter: Literal["lora"] | None = shared(
        None, "only an adapter of this kind is trained, beside a frozen base (library peft); null: the model itself"
    )
    lora_r: int = shared(8, "the rank of LoRA's two matrices", ge=1, le=1024)
    lora_alpha: float = shared(16, "what they add is scaled by this, divided by the rank", gt=0)
    lora_dropout: float = shared(0.0, "dropout of what goes into them", ge=0, lt=1)
    lora_target_modules: tuple[str, ...] | Literal["all-linear"] | None = shared(
        None, "beside which modules: the ends of their names, or all-linear; null: as peft has it for the architecture"
    )
    lora_modules_to_save: tuple[str, ...] | None = shared(
        None, "modules that are trained whole, as a copy in the adapter"
    )
    peft_use_rslora: bool = shared(False, "lora_alpha is divided by the root of the rank")
    peft_layers_to_transform: tuple[int, ...] | None = shared(
        None, "the numbers of the layers with an adapter; null: all", max_length=1024
    )
    load_in_8bit: bool = shared(False, "the base is held in 8 bits a weight")
    load_in_4bit: bool = shared(False, "the base is held in 4 bits a weight")
    quantized_by: str | None = shared(
        None,
        "the package that does it, with its version, as pip takes it; `swarm validate` tells it",
        pattern="^(torchao|bitsandbytes)==[0-9][0-9A-Za-z.+-]{0,40}$",
    )
    tokenizer: str | None = shared(
        None,
        "bytes (256 bytes and 3 specials), a directory with a saved tokenizer, or owner/name on the Hub; null: the "
        "base model's own if that is a saved one, else bytes",
        min_length=1,
    )
    tokenizer_revision: str | None = shared(
        None, "the commit of a tokenizer of the Hub that is not the base model's own", max_length=200
    )
    datasets: tuple[Dataset, ...] = shared(REQUIRED, "what the model reads; see below", min_length=1)
    chat_template: ChatTemplate | None = shared(
        None, "how conversations become text: chatml, or a Jinja template; without it the tokenizer's own"
    )
    labels: tuple[LabelName, ...] = shared(
        (), "for classification: the names of the classes; see Tasks for numbers in the data", max_length=100_000
    )
    sequence_len: int = shared(0, "tokens per sample, where the task reads texts", ge=2, le=1 << 20)
    sample_packing: bool = shared(False, "several rows in one sample, kept apart; otherwise short ones are padded")
    target_batch_size: int = shared(REQUIRED, "samples that all peers together compute per epoch", ge=1)
    micro_batch_size: int = advised(8, "samples per forward pass", ge=1)
    gradient_accumulation_steps: int = advised(1, "forward passes between two reports of progress", ge=1)
    gradient_checkpointing: bool = advised(
        False,
        "keep only what layers begin with, and compute the rest again: a third slower, far less memory",
    )
    label_smoothing_factor: float = shared(
        0.0, "this share of each label is spread over all classes or tokens; evaluations measure without", ge=0, lt=1
    )
    ema_decay: float = shared(
        0.0,
        "after each epoch, average = ema_decay·average + (1 - ema_decay)·weights; 0: no average is kept",
        ge=0,
        lt=1,
    )
    val_set_size: float = shared(0.0, "the same as evaluation.held_out, by axolotl's name", ge=0, le=0.5)
    seed: int = shared(0, "initial weights, and with the peer id the order of the data", ge=0, lt=1 << 63)
    max_epochs: int | None = shared(None, "the run ends behind this epoch; null: when it is stopped", ge=1)
    license: str | None = advised(
        None, "of the model, as the Hub names it, for its card: apache-2.0, mit, …; null: unknown", max_length=64
    )
    language: tuple[LabelName, ...] = advised((), "languages of the model, as the Hub names them: [en]", max_length=64)
    tags: tuple[LabelName, ...] = advised((), "words by which others find the model on the Hub", max_length=32)
    output_dir: OwnPath = own(
        Path("runs"), "journals, checkpoints and keys, relative to the recipe", validate_default=True
    )
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
    _overrides: tuple[str, ...] = PrivateAttr(())
    _notes: tuple[str, ...] = PrivateAttr(())

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
        if isinstance(self.base_model, Mapping) and not isinstance(self.base_model.get("model_type"), str):
            raise Conflict("base_model", "base_model lacks model_type; add for example `model_type: gpt2`")
        if self.access == "invite" and self.run_key is None:
            raise Conflict(
                "access", "invitations are signed by a key of the run; add the run_key that `swarm init --invite` makes"
            )
        _check_task(self)
        _check_revisions(self)
        check_adapter(self)
        _check_schedule(self.lr_scheduler, self.max_epochs)
        _check_batches(self)
        _check_statistics(self)
        _check_several_groups(self)
        _check_sparse(self)
        _check_aggregator(self)
        _check_local_updates(self)
        _check_outer(self)
        _check_site(self)
        _check_evaluation(self)
        _check_rows(self)
        return self

    @property
    def file(self) -> str:
        """The recipe file as it was named."""
        return self._file

    @property
    def overrides(self) -> tuple[str, ...]:
        """The values that were set beside the file, as `a.b=value`."""
        return self._overrides

    @property
    def notes(self) -> tuple[str, ...]:
        """Advice, each with its line and what to write: a key that has another name now, an evaluation that the run
        ends before."""
        return self._notes

    @property
    def source(self) -> tuple[str, tuple[str, ...], str, str]:
        """`parse_recipe` made this recipe of these: text, overrides, name and directory."""
        return self._text, self._overrides, self._file, str(self._directory)

    @property
    def directory(self) -> Path:
        """Where the recipe file lies; relative paths begin here."""
        return self._directory

    def locate(self, text: str, *, data: bool = False) -> Path:
        """The absolute path of what is written in a shared field; `data` for files of datasets."""
        return beside((self.local.data_dir if data else None) or self._directory, text)

    def origin(self, *path: str | int) -> str:
        """`file:line` of a value, or of the nearest that is written above it: for messages."""
        here = self._root
        for key in path:
            below = here.child(key)
            if below is None:
                break
            here = below
        return here.origin

    @property
    def trust(self) -> Literal["strangers", "members"]:
        """Whether the members of a group may lie to each other, or only fail."""
        return self.averaging.trust or ("members" if self.access == "invite" else "strangers")

    @property
    def aggregator(self) -> str:
        """The name of what becomes of the members' parts."""
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


def _check_task(recipe: Recipe) -> None:
    """Refuses a recipe that lacks what its task needs, or has what its task does not use. A task that another package
    brings says so itself."""
    task = BUILT_IN.get(recipe.task)
    if len(set(recipe.labels)) < len(recipe.labels):
        raise Conflict("labels", "labels: one of them is there twice; each class needs a name of its own")
    if task is None:
        return
    if task.texts and not recipe.sequence_len:
        raise Conflict("sequence_len", "sequence_len is missing; add `sequence_len: …` (tokens per sample)")
    if not task.texts:
        for key in {"sequence_len", "tokenizer"} & recipe.model_fields_set:
            raise Conflict(key, f"{key}: {recipe.task} reads no text; remove {key}")
    if task.labelled and len(recipe.labels) < 2:
        raise Conflict(
            "labels",
            f"labels: {recipe.task} needs the names of two classes or more; add `labels: [negative, positive]`",
        )
    if recipe.labels and not task.labelled:
        raise Conflict(
            "labels", f"labels: the model of {recipe.task} {task_in_words(recipe.task)} and has no classes; remove them"
        )


def _check_revisions(recipe: Recipe) -> None:
    """Refuses a commit of what is no name of the Hub."""
    named = {"revision": ("base_model", recipe.base_model), "tokenizer_revision": ("tokenizer", recipe.tokenizer)}
    for key, (of, text) in named.items():
        if getattr(recipe, key) is not None and not (isinstance(text, str) and HUB_NAME.fullmatch(text)):
            raise Conflict(
                key, f"{key} is a commit of a {of} of the Hugging Face Hub; remove it, or write `{of}: owner/name`"
            )


def _check_schedule(schedule: SchedulerSettings, max_epochs: int | None) -> None:
    """Refuses a schedule without an end where it needs one, and keys that its shape would not use."""
    if not schedule.ends:
        return
    end = schedule.total_epochs or max_epochs
    if end is None:
        raise Conflict(
            "lr_scheduler.name",
            f"lr_scheduler.name: a {schedule.name} schedule needs an end; add max_epochs or lr_scheduler.total_epochs",
        )
    if schedule.warmup_epochs + (schedule.decay_epochs or 0) >= end:
        key = "decay_epochs" if schedule.warmup_epochs < end else "warmup_epochs"
        what = f"a warm-up of {schedule.warmup_epochs} epochs" if schedule.warmup_epochs else "a decay"
        beside = f" and {schedule.decay_epochs} of decay" if schedule.decay_epochs else ""
        raise Conflict(f"lr_scheduler.{key}", f"{what}{beside} does not fit into {end}; make it shorter than that")


def _check_batches(recipe: Recipe) -> None:
    """Refuses steps of one process that are larger than the whole swarm's epoch: each would overshoot it."""
    samples = recipe.micro_batch * recipe.accumulation_steps
    if samples > recipe.target_batch_size:
        own = [key for key in ("micro_batch_size", "gradient_accumulation_steps") if getattr(recipe.local, key)]
        raise Conflict(
            f"local.{own[0]}" if own else "micro_batch_size",
            f"a step of {recipe.micro_batch} × {recipe.accumulation_steps} samples is larger than an epoch of the "
            f"whole swarm; lower micro_batch_size or gradient_accumulation_steps to at most {recipe.target_batch_size} "
            "samples together, or raise target_batch_size",
        )


def _check_statistics(recipe: Recipe) -> None:
    """Refuses to average what the chosen optimizer does not keep."""
    known = OPTIMIZERS[recipe.optimizer.name].statistics
    for statistic in recipe.averaging.average_opt_statistics:
        if statistic not in known:
            raise Conflict(
                "averaging.average_opt_statistics",
                f"{recipe.optimizer.name} keeps no statistic {statistic!r}; it has {' and '.join(known)}",
            )


def _check_several_groups(recipe: Recipe) -> None:
    """Refuses what needs one average that all peers share."""
    if recipe.averaging.target_group_size is None:
        return
    method = recipe.gradient_averaging.method
    if method != "plain":
        shares = "which share what it compresses with"
        if method == "topk":
            shares = "since after rounds of several ones whole states are averaged"
        raise Conflict(
            "averaging.target_group_size",
            f"{method} needs one group of all peers, {shares}; remove target_group_size, or use method: plain",
        )
    if recipe.compression.state_averaging != "none" and not recipe.local_updates.enabled:
        raise Conflict(
            "compression.state_averaging",
            f"several groups have no common average from which {recipe.compression.state_averaging} could tell small "
            "differences; remove it, or averaging.target_group_size",
        )


def _check_sparse(recipe: Recipe) -> None:
    """Refuses what sparse gradients do not go with."""
    if recipe.gradient_averaging.method != "topk":
        return
    robust = "a median of sparse parts is zero wherever fewer than half of the members sent a number"
    if recipe.trust == "strangers":
        raise Conflict(
            "gradient_averaging.method",
            f"topk is for members who trust each other: {robust}, and nothing else bounds what a stranger's message "
            "does; add averaging.trust: members or access: invite, or use method: plain",
        )
    if recipe.aggregator != "mean":
        raise Conflict("averaging.aggregator.name", f"{robust}; use aggregator.name: mean with topk")
    if recipe.compression.gradients != "none":
        raise Conflict(
            "compression.gradients",
            "topk says in gradient_averaging.bits how gradients travel; remove compression.gradients",
        )


def _check_aggregator(recipe: Recipe) -> None:
    """Refuses what would make something else than an average of two thin matrices."""
    method = recipe.gradient_averaging.method
    if method in ("powersgd", "poweref") and recipe.aggregator != "mean":
        raise Conflict(
            "averaging.aggregator.name",
            f"{method} takes its matrices apart and puts them together again, which only means survive; use "
            "aggregator.name: mean, or gradient_averaging.method: plain",
        )


def _check_local_updates(recipe: Recipe) -> None:
    """Refuses what belongs to the averaging of gradients."""
    if not recipe.local_updates.enabled:
        return
    if recipe.gradient_averaging.model_fields_set:
        key = min(recipe.gradient_averaging.model_fields_set)
        raise Conflict(
            f"gradient_averaging.{key}",
            "local updates average parameters, never gradients; remove gradient_averaging, or set "
            "local_updates.enabled: false",
        )
    if "gradients" in recipe.compression.model_fields_set:
        raise Conflict(
            "compression.gradients",
            "local updates send no gradients; set compression.state_averaging instead, or set "
            "local_updates.enabled: false",
        )
    if recipe.ema_decay:
        raise Conflict(
            "ema_decay",
            "peers average over epochs the weights that all of them hold alike, and with local updates each has its "
            "own; remove ema_decay, or set local_updates.enabled: false",
        )
    for key, delayed in (("grad_averaging", recipe.delay.grad_averaging), ("optimizer_step", recipe.delay.step)):
        if delayed:
            raise Conflict(
                f"delay.{key}",
                "local updates step after every batch and wait for nobody then; remove it (delay.state_averaging "
                "is what lets them go on while parameters are averaged)",
            )


def _check_evaluation(recipe: Recipe) -> None:
    """Refuses to evaluate on what is trained on."""
    evaluation = recipe.evaluation
    if recipe.val_set_size and (evaluation.held_out or evaluation.dataset is not None):
        key = "held_out" if evaluation.held_out else "dataset"
        raise Conflict("val_set_size", f"it says the same as evaluation.{key}; remove one of the two")
    if recipe.val_set_size and not evaluation.every_epochs:
        every = min(50, recipe.max_epochs or 50)  # above max_epochs it would never come
        raise Conflict(
            "val_set_size", f"nothing evaluates on what it holds out; add `evaluation: {{every_epochs: {every}}}`"
        )
    if evaluation.every_epochs and not recipe.held_out and evaluation.dataset is None:
        raise Conflict(
            "evaluation.every_epochs",
            "an evaluation needs data that nobody trains on; add `held_out: 0.02` for a share, or name a dataset",
        )
    if recipe.checkpoint.upload.when == "best" and not evaluation.every_epochs:
        raise Conflict(
            "checkpoint.upload.when",
            "nothing is evaluated, so nothing is best; set evaluation.every_epochs, or each",
        )
    if evaluation.dataset is not None:
        wanted = _rows_of(evaluation.dataset)
        if any(_rows_of(dataset) == wanted for dataset in recipe.datasets):
            raise Conflict(
                "evaluation.dataset",
                "the run trains on this dataset; name another one, or take `held_out: 0.02`",
            )


def _rows_of(dataset: AnyDataset) -> dict[str, Any]:
    """By these values the rows of a dataset are chosen."""
    return dataset.model_dump(include={"source", "path", "glob", "name", "split", "data_files"})


def _check_rows(recipe: Recipe) -> None:
    """Refuses what says how rows are read where none are read so."""
    items = {f"datasets.{index}": dataset for index, dataset in enumerate(recipe.datasets)}
    if recipe.evaluation.dataset is not None:
        items["evaluation.dataset"] = recipe.evaluation.dataset
    for name, item in items.items() if recipe.task in BUILT_IN and BUILT_IN[recipe.task].texts else ():
        if getattr(item, "path", "") == "imagefolder":
            raise Conflict(
                f"{name}.path",
                f"{name}.path: imagefolder gives images, and {recipe.task} reads texts; name texts, or take "
                "task: image_classification",
            )
    if recipe.task in BUILT_IN and recipe.task != "causal_lm":
        learned = next((f"{name}.type" for name, item in items.items() if item.type != "text"), None)
        if key := "sample_packing" if recipe.sample_packing else learned:
            raise Conflict(key, f"{recipe.task} reads no rows so; remove {key}, or take task: causal_lm")
    # transformers looks for the borders of rows in the positions of a single sample alone.
    if recipe.sample_packing and recipe.local.attn_implementation == "flash_attention_2" and recipe.micro_batch > 1:
        raise Conflict(
            "local.attn_implementation",
            "flash_attention_2 keeps the rows of packed samples apart only where a batch is one sample; set "
            "local.micro_batch_size: 1 (and raise local.gradient_accumulation_steps), or take sdpa or flex_attention",
        )
    chats = [item for item in items.values() if isinstance(item, HuggingFaceDataset) and item.type == "chat_template"]
    if recipe.chat_template is not None and all(chat.chat_template is not None for chat in chats):
        raise Conflict(
            "chat_template",
            "each dataset with type: chat_template has a template of its own; remove one of the two"
            if chats
            else "no dataset has conversations; set type: chat_template in one of datasets, or remove it",
        )


def _check_outer(recipe: Recipe) -> None:
    """Refuses what outer steps have no use for, and batches that do not make up an inner step."""
    if not recipe.outer.takes_steps:
        return
    sparse = recipe.gradient_averaging.method == "topk"
    if sparse and recipe.outer.has_momentum:
        raise Conflict(
            "outer.momentum" if recipe.outer.momentum else "outer.optimizer",
            "outer.momentum and adam do not go with gradient_averaging.method: topk, whose peers keep what they "
            "have not sent, while a momentum applies again what they have; write outer.optimizer: sgd alone",
        )
    low_rank = recipe.gradient_averaging.method in ("powersgd", "poweref")
    no_use = {
        "gradient_averaging.method": (low_rank, "no gradients are averaged"),
        "local_updates.enabled": (recipe.local_updates.enabled, "it is another way to train"),
        "averaging.target_group_size": (recipe.averaging.target_group_size, "one anchor needs one group"),
        "averaging.average_state_every": (recipe.averaging.average_state_every, "all peers have the same anchor"),
        "delay.grad_averaging": (recipe.delay.grad_averaging, "trainers go on during a round in any case"),
        "delay.optimizer_step": (recipe.delay.step, "trainers go on during a round in any case"),
        "local.offload_optimizer": (recipe.local.offload_optimizer, "the optimizer makes steps of the model itself"),
        "local.site.processes": (recipe.local.site.processes > 1, "a peer that makes them is one process"),
    }
    for key, (given, reason) in no_use.items():
        if given:
            raise Conflict(key, f"{key} has no use with outer steps: {reason}; remove it, or remove outer")
    samples = recipe.micro_batch * recipe.accumulation_steps
    if recipe.outer.inner_batch_size % samples:
        raise Conflict(
            "outer.inner_batch_size",
            f"an inner step of {recipe.outer.inner_batch_size} samples is not made up of {recipe.micro_batch} × "
            f"{recipe.accumulation_steps} (micro_batch_size × gradient_accumulation_steps); set local.micro_batch_size "
            "to one of its divisors",
        )
    if recipe.outer.inner_batch_size > recipe.target_batch_size:
        raise Conflict(
            "outer.inner_batch_size",
            f"an inner step of {recipe.outer.inner_batch_size} samples of one peer is larger than an outer step of the "
            f"whole swarm ({recipe.target_batch_size}); raise target_batch_size to many inner steps",
        )


def _check_site(recipe: Recipe) -> None:
    """Refuses a site that contradicts how the run averages or what it computes on."""
    local, site = recipe.local, recipe.local.site
    if site.zero and recipe.offloaded:
        why = "delay" if recipe.delay.step else "local.offload_optimizer"
        raise Conflict(
            "local.site.zero",
            f"zero leaves no whole optimizer that {why} could keep in host memory; remove zero"
            + ("" if recipe.delay.step else ", or offload_optimizer"),
        )
    if site.zero and recipe.averaging.average_opt_statistics:
        names = ", ".join(recipe.averaging.average_opt_statistics)
        raise Conflict(
            "local.site.zero",
            f"the run averages statistics of the optimizer ({names}), and with zero they lie in several processes; "
            "remove zero, or join a run whose averaging.average_opt_statistics is empty",
        )
    if site.zero and recipe.ema_decay:
        raise Conflict(
            "local.site.zero",
            "the run averages its weights over epochs (ema_decay), and with zero no process holds all of that average "
            "for checkpoints and evaluations; remove zero",
        )
    if site.zero and recipe.optimizer.name == "muon":
        raise Conflict(
            "local.site.zero",
            "muon steps two kinds of parameters, and zero deals them out to processes whatever their kind; remove zero",
        )
    if site.processes > 1 and (local.device == "mps" or ":" in local.device):
        raise Conflict(
            "local.device",
            f"{local.device} is one device, and the site has {site.processes} processes; write cuda (a device for "
            "each process), cpu or auto",
        )
