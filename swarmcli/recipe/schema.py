"""The recipe as typed values. What a field means stands in its description, from which docs/recipes.md is made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from swarmcli.errors import AddressError
from swarmcli.network.addresses import parse_address
from swarmcli.recipe.checks import Conflict, beside, check_batches, check_modes, check_optimizer, check_schedule
from swarmcli.recipe.document import Entry
from swarmcli.recipe.fingerprint import fingerprint_of
from swarmcli.recipe.modes import (
    AveragingSettings,
    CompressionSettings,
    DelaySettings,
    GradientAveragingSettings,
    LocalUpdateSettings,
)
from swarmcli.recipe.section import REQUIRED, Section, own, shared
from swarmcli.recipe.site import SiteSettings, check_site


def _resolve(path: Path, info: ValidationInfo) -> Path:
    return beside((info.context or {}).get("directory", Path.cwd()), str(path))


def _check_address(text: str) -> str:
    try:
        parse_address(text)
    except AddressError as error:
        raise ValueError(str(error)) from error
    return text


OwnPath = Annotated[Path, AfterValidator(_resolve)]
AddressText = Annotated[str, AfterValidator(_check_address)]


class FilesDataset(Section):
    """Text from a file, or from all files below a directory."""

    type: Literal["files"] = shared(REQUIRED, "text files of this machine")
    path: str = shared(
        REQUIRED, "a file or a directory, relative to local.data_dir or else to the recipe", min_length=1
    )
    glob: str = shared("**/*", "which files of a directory, for example **/*.py", min_length=1)
    weight: float = shared(1.0, "how often documents come from this source, relative to the others", gt=0)


class StdlibDataset(Section):
    """The sources of Python's own standard library: real text that is on every machine."""

    type: Literal["stdlib"] = shared(REQUIRED, "the sources of Python's standard library")
    weight: float = shared(1.0, "how often documents come from this source, relative to the others", gt=0)


class HuggingFaceDataset(Section):
    """What `datasets.load_dataset` reads: a dataset of the Hub, or local json, parquet, csv or text files."""

    type: Literal["huggingface"] = shared(REQUIRED, "a dataset for the library `datasets` (extra: swarmcli[datasets])")
    path: str = shared(REQUIRED, "its name on the Hub, or json, parquet, csv or text for `data_files`", min_length=1)
    name: str | None = shared(None, "the configuration of a dataset that has several")
    split: str = shared("train", "which split", min_length=1)
    data_files: tuple[str, ...] = shared((), "files of the dataset; local ones as `path` of a files dataset")
    revision: str | None = shared(None, "a commit or tag of the dataset, so that all peers read the same")
    text_column: str = shared("text", "the column that holds the text", min_length=1)
    streaming: bool = own(True, "read while training instead of downloading everything first")
    weight: float = shared(1.0, "how often documents come from this source, relative to the others", gt=0)


Dataset = Annotated[FilesDataset | StdlibDataset | HuggingFaceDataset, Field(discriminator="type")]


class OptimizerSettings(Section):
    """The optimizer that every peer steps with the average gradient."""

    name: Literal["adamw", "adam", "sgd"] = shared("adamw", "which optimizer")
    learning_rate: float = shared(1e-3, "the peak of the schedule", gt=0)
    weight_decay: float = shared(0.0, "decay of matrices and embeddings; biases and norms have none", ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = shared(
        (0.9, 0.999), "decay rates of the two moments (adam, adamw)"
    )
    eps: float = shared(1e-8, "added to the denominator (adam, adamw)", gt=0)
    momentum: float = shared(0.0, "momentum (sgd)", ge=0, lt=1)
    max_grad_norm: float | None = shared(None, "the average gradient is scaled down to this norm; null: never", gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerSettings:
        check_optimizer(self.name, self.model_fields_set)
        return self


class SchedulerSettings(Section):
    """How the learning rate moves. One step is one epoch: one step of the optimizer by the whole swarm."""

    name: Literal["constant", "linear", "cosine"] = shared("constant", "the shape behind the warm-up")
    warmup_steps: int = shared(0, "epochs in which the rate rises from near zero to its peak", ge=0)
    total_steps: int | None = shared(None, "the epoch at which linear and cosine end; null: max_epochs", ge=1)
    min_lr_ratio: float = shared(0.0, "where linear and cosine end, as a fraction of learning_rate", ge=0, le=1)


class CheckpointSettings(Section):
    every_epochs: int = own(
        0, "write a checkpoint every so many epochs, unless another peer does; 0: only when leaving", ge=0
    )
    keep: int = own(3, "how many of the newest checkpoints stay on the disk", ge=1)


class NetworkSettings(Section):
    initial_peers: tuple[AddressText, ...] = own((), "addresses of first contacts: tcp://host:port or …/peer id")


class LocalSettings(Section):
    """What each volunteer chooses for this machine. Nothing of it is compared with others."""

    device: str = own(
        "auto", "auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps", pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = own(
        "auto", "what is computed in: auto is bfloat16 autocast on CUDA devices that have it, else float32"
    )
    threads: int | None = own(
        None,
        "processor threads of each process for arithmetic; null: the trainers of this machine share its cores",
        ge=1,
    )
    micro_batch_size: int | None = own(None, "overrides micro_batch_size on this machine", ge=1)
    gradient_accumulation_steps: int | None = own(None, "overrides gradient_accumulation_steps here", ge=1)
    shuffle_buffer_size: int = own(
        16384,
        "sequences that are shuffled together, at most; of long ones fewer: 2²⁰ tokens, or 1024",
        ge=1,
        le=1 << 20,
    )
    data_dir: OwnPath | None = own(None, "where relative paths of datasets begin; null: beside the recipe")
    name: str | None = own(None, "how this peer is called on the dashboard; null: the short peer id", max_length=64)
    client_mode: bool = own(False, "never listen: for machines that cannot be dialed")
    host: str = own("0.0.0.0", "the interface to listen on", min_length=1)
    port: int = own(0, "the port to listen on; 0: any free one", ge=0, le=65535)
    announce_addresses: tuple[AddressText, ...] = own((), "addresses told to others; empty: found out")
    identity_path: OwnPath | None = own(None, "the key file of this peer; null: in its directory below output_dir")
    bandwidth: float | None = own(
        None, "share of the reducing work, relative to other peers; 0: none; null: as the others", ge=0
    )
    offload_optimizer: bool = own(
        False, "keep the optimizer and a copy of the parameters in host memory; a delayed step does so anyway"
    )
    check_memory: bool = own(True, "refuse a model for which this machine has too little memory; false: try it anyway")
    trust_remote_code: bool = own(False, "let a local checkpoint directory run Python code that lies in it")
    site: SiteSettings = SiteSettings()


class Recipe(Section):
    """A whole recipe. Made by `load_recipe`; paths of `own` fields are absolute, others as they were written."""

    run_id: str = shared(
        REQUIRED,
        "the name of the run: up to 64 letters, digits, dots, dashes, underscores",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
    )
    task: Literal["causal_lm"] = shared("causal_lm", "what is learned: causal_lm predicts the next token")
    base_model: Mapping[str, Any] | str = shared(
        REQUIRED, "a transformers config (`model_type` and its fields), or a directory with a saved model"
    )
    tokenizer: str = shared(
        "bytes", "bytes (256 bytes and 3 specials), or a directory with a saved tokenizer", min_length=1
    )
    datasets: tuple[Dataset, ...] = shared(REQUIRED, "what the model reads; see below", min_length=1)
    sequence_len: int = shared(REQUIRED, "tokens per sample", ge=2, le=1 << 20)
    target_batch_size: int = shared(REQUIRED, "samples that all peers together compute per epoch", ge=1)
    micro_batch_size: int = own(8, "samples per forward pass", ge=1)
    gradient_accumulation_steps: int = own(1, "forward passes between two reports of progress", ge=1)
    seed: int = shared(0, "initial weights, and with the peer id the order of the data", ge=0, lt=1 << 63)
    max_epochs: int | None = shared(None, "the run ends behind this epoch; null: when it is stopped", ge=1)
    output_dir: OwnPath = own(
        Path("runs"), "journals, checkpoints and keys, relative to the recipe", validate_default=True
    )
    optimizer: OptimizerSettings = OptimizerSettings()
    lr_scheduler: SchedulerSettings = SchedulerSettings()
    averaging: AveragingSettings = AveragingSettings()
    gradient_averaging: GradientAveragingSettings = GradientAveragingSettings()
    delay: DelaySettings = DelaySettings()
    local_updates: LocalUpdateSettings = LocalUpdateSettings()
    compression: CompressionSettings = CompressionSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    network: NetworkSettings = NetworkSettings()
    local: LocalSettings = LocalSettings()

    _root: Entry = PrivateAttr(default_factory=lambda: Entry({}, "recipe"))
    _directory: Path = PrivateAttr(default_factory=Path.cwd)

    @field_validator("base_model", mode="before")
    @classmethod
    def _config_or_directory(cls, value: Any) -> Any:
        if not isinstance(value, Mapping | str) or not value:
            raise ValueError("write a transformers config below it (`model_type: gpt2` …), or a directory beside it")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if isinstance(self.base_model, Mapping) and not isinstance(self.base_model.get("model_type"), str):
            raise Conflict("base_model", "base_model lacks model_type; add for example `model_type: gpt2`")
        check_schedule(self.lr_scheduler, self.max_epochs)
        check_batches(self)
        check_modes(self)
        check_site(self)
        return self

    def fingerprint(self) -> dict[str, str]:
        """Dotted key → short hash, for every key that must agree between peers, and `protocol`.

        Raises RecipeError when a model or tokenizer directory that it names cannot be read.
        """
        return fingerprint_of(self)

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
