"""The sections of a recipe as typed values. A field's description says what it means (docs/recipes.md is made from it),
and its selectors beside which values of other keys it means something. `rules` says what else does not go together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)

from swarmcli.errors import AddressError
from swarmcli.network.addresses import Scope, parse_address, scope_of
from swarmcli.network.identity import PeerID
from swarmcli.recipe.dataset import Dataset
from swarmcli.recipe.limits import Limits, read_journal_size
from swarmcli.recipe.optimizers import OPTIMIZERS, check_args
from swarmcli.recipe.patterns import ON_HUB
from swarmcli.recipe.section import Conflict, Section, advised, own, shared


def beside(directory: Path, text: str) -> Path:
    """Returns an absolute path: `~` is the home directory, and what is relative begins in `directory`."""
    return (directory / Path(text).expanduser()).resolve()


OptimizerName: TypeAlias = Literal[
    "adamw", "adam", "sgd", "muon", "adamax", "nadam", "radam", "adagrad", "adadelta", "adafactor", "rmsprop", "rprop",
    "asgd",
]  # fmt: skip
Codec: TypeAlias = Literal[
    "none", "float16", "bfloat16", "scaled_float16", "uniform_8bit", "quantile_8bit", "blockwise_8bit"
]
# No four bits for parameters: what is rounded so coarsely must be small beside what it is added to.
GradientCodec: TypeAlias = Literal[Codec, "blockwise_4bit"]


def _optimizer_name(value: Any) -> Any:
    """torch writes AdamW, most recipes adamw. Raises ValueError for optimizers of torchao: a newcomer could not go on
    with their statistics."""
    name = value.lower() if isinstance(value, str) else value
    if name in ("adam8bit", "adamw8bit", "adam4bit", "adamw4bit", "adamfp8", "adamwfp8"):
        raise ValueError(
            f"{value} keeps statistics in fewer bits, and a newcomer gets them in float32: it would round otherwise "
            "than the others, and its parameters would differ from theirs; for less memory take adafactor, or adamw "
            "with local.offload_optimizer or local.site.zero"
        )
    return name


def _takers(key: str) -> tuple[str, ...]:
    return tuple(name for name, kind in OPTIMIZERS.items() if key in kind.keys)


JournalSize = Annotated[int, BeforeValidator(lambda value: int(read_journal_size(value)))]


def _check_webhook(text: str) -> str:
    """Alerts tell of a run, and the address itself is often a password, so neither may travel unencrypted."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port, parts = "", 0, urlsplit("")
    if not host or port == 0 or parts.username is not None or parts.scheme not in ("http", "https"):
        raise ValueError("it is no address of the web; write for example https://example.org/alerts")
    if parts.scheme == "http" and host != "localhost" and scope_of(host) is not Scope.HOST:
        raise ValueError("alerts would travel unencrypted; use https, or http to this computer")
    return text


def _check_address(text: str) -> str:
    try:
        parse_address(text)
    except AddressError as error:
        raise ValueError(str(error)) from error
    return text


def _check_key(text: str) -> str:
    try:
        PeerID.parse(text)
    except AddressError:
        raise ValueError(
            f"{text[:80]!r} is no run key: expected the 52 characters that `swarm init` wrote; it is the public half"
        ) from None
    return text


KeyText = Annotated[str, AfterValidator(_check_key)]
OwnPath = Annotated[
    Path,
    AfterValidator(lambda path, info: beside((info.context or {}).get("directory", Path.cwd()), str(path))),
]
AddressText = Annotated[str, AfterValidator(_check_address)]
PeerText = Annotated[str, AfterValidator(lambda text: PeerID.parse(text).text)]


class OptimizerSettings(Section):
    """The optimizer that every peer steps with the average gradient."""

    name: Annotated[OptimizerName, BeforeValidator(_optimizer_name)] = shared("adamw", "an optimizer of torch")
    learning_rate: float = shared(1e-3, "the peak of the schedule", gt=0)
    weight_decay: float = shared(0.0, "not of biases and norms", ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = shared(
        (0.9, 0.999), "decay rates of the two moments", of={"name": _takers("betas")}
    )
    eps: float = shared(1e-8, "in the denominator; adagrad: 1e-10, adadelta: 1e-6", of={"name": _takers("eps")}, gt=0)
    momentum: float = shared(0.0, "muon: 0.95", of={"name": _takers("momentum")}, ge=0, lt=1)
    args: Mapping[str, Any] = shared({}, "further arguments by torch's names: {nesterov: true}")
    max_grad_norm: float | None = shared(
        None, "largest norm of the average gradient; with outer steps, of a peer's own", gt=0
    )
    max_grad_value: float | None = shared(None, "largest number in that gradient", gt=0)

    @model_validator(mode="after")
    def _as_torch_has_it(self) -> OptimizerSettings:
        try:
            check_args(self.name, self.args)
        except ValueError as error:
            raise Conflict(("args", f"optimizer.args: {error}")) from None
        for key, usual in OPTIMIZERS[self.name].keys.items():
            if key not in self.model_fields_set:  # torch's default for this optimizer; fingerprints count it as well
                self.__dict__[key] = usual
        return self


Shape: TypeAlias = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
_FALLING = "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "warmup_stable_decay"


class SchedulerSettings(Section):
    """How the learning rate moves, epoch by epoch: an epoch is one step of the optimizer by the whole swarm."""

    name: Shape = shared("constant", "shape after the warm-up")
    warmup_epochs: int = shared(0, "epochs in which the rate rises from 0", ge=0)
    total_epochs: int | None = shared(None, "where a falling shape ends; null: max_epochs", of={"name": _FALLING}, ge=1)
    min_lr_ratio: float = shared(
        0.0, "end of a falling shape, as a fraction of learning_rate", of={"name": _FALLING}, ge=0, le=1
    )
    cycles: int = shared(1, "how often the rate begins anew", of={"name": ("cosine_with_restarts",)}, ge=1)
    power: float = shared(1.0, "exponent", of={"name": ("polynomial",)}, gt=0)
    decay_epochs: int | None = shared(
        None, "last epochs, in which the rate falls", of={"name": ("warmup_stable_decay",)}, ge=1
    )

    @property
    def ends(self) -> bool:
        """Whether the shape has an end at which it has fallen."""
        return self.name in _FALLING


class UploadSettings(Section):
    """Where on the Hugging Face Hub the model of a checkpoint goes."""

    repo: str | None = own(None, "owner/name on the Hub that gets the model", pattern=f"^{ON_HUB.pattern}$")
    private: bool = own(True, "make the repository private")
    when: Literal["each", "best"] = own("each", "each checkpoint, or only a new best")


class CheckpointSettings(Section):
    every_epochs: int = advised(0, "epochs between checkpoints; 0: only when a peer leaves", ge=0)
    keep: int = own(3, "newest ones that stay", ge=1)
    keep_every: int = own(0, "one in so many epochs stays for good; 0: none", ge=0)
    keep_best: int = own(1, "ones with the lowest evaluation loss that stay", ge=0)
    upload: UploadSettings = UploadSettings()


class EvaluationSettings(Section):
    """Measuring the model on data that nobody trains on."""

    every_epochs: int = shared(0, "epochs between evaluations; 0: none", ge=0)
    samples: int = shared(256, "samples to evaluate on, at most", ge=1)
    evaluator: PeerText | None = shared(None, "peer id of the monitor that evaluates and stops early; null: any peer")
    early_stopping_patience: int = shared(
        0, "evaluations in a row without improvement that end the run; 0: never", ge=0
    )
    early_stopping_threshold: float = shared(0.0, "least improvement of the loss", ge=0)
    held_out: float = shared(0.0, "share of all data that nobody trains on", ge=0, le=0.5)
    dataset: Dataset | None = shared(None, "data to evaluate on instead, with the keys of datasets")


class NetworkSettings(Section):
    initial_peers: tuple[AddressText, ...] = own((), "first contacts: tcp://host:port, or …/peer id")


class AggregatorSettings(Section):
    """How the members' gradients and parameters become one average; docs/security.md has what each withstands."""

    name: Literal["mean", "median", "trimmed_mean", "centered_clip"] | None = shared(
        None, "null: centered_clip among strangers with plain gradients, else mean"
    )
    gate: float = shared(1000.0, "a member above this many times the others is left out", of={"name": ("mean",)}, ge=1)
    trim: float = shared(0.34, "share that is cut off at each end", of={"name": ("trimmed_mean",)}, gt=0, lt=0.5)
    radius: float = shared(1.0, "clip at this many times the median norm", of={"name": ("centered_clip",)}, gt=0)
    iterations: int = shared(
        3, "times values are clipped, each around the last result", of={"name": ("centered_clip",)}, ge=1, le=20
    )


class AveragingSettings(Section):
    """How peers meet and average. Times are upper bounds: a group that is complete starts at once."""

    matchmaking_time: float = advised(15.0, "seconds to look for others, at most", gt=0)
    averaging_timeout: float = advised(
        60.0, "seconds of one try of a round (more on slow lines), and to try a failed one again", gt=0
    )
    load_state_timeout: float = advised(600.0, "seconds of a download without progress, at most", gt=0)
    proceed_alone: bool = own(False, "train apart when nobody's state can be reached")
    target_group_size: int | None = shared(
        None, "more peers than this average in several groups; null: one group", ge=2
    )
    seats_per_network: int | None = shared(
        16, "members of a group per network (IPv4 /24, IPv6 /48); null: any number", ge=1
    )
    part_size_bytes: int = shared(1 << 20, "largest part of a tensor", ge=1024, le=8 << 20)
    trust: Literal["strangers", "members"] | None = shared(
        None, "strangers (a third of a group may lie) or members (nobody); null: members if access is invite"
    )
    max_share: float = shared(0.75, "largest share of the weight of one peer, from four members on", gt=0, le=1)
    audit: float = shared(0.005, "share of averages that peers compute again", ge=0, le=1)
    average_state_every: int | None = shared(
        None,
        "epochs between averages of parameters; null: 1 with local updates or several groups, "
        "else when they drift apart",
        ge=1,
    )
    aggregator: AggregatorSettings = AggregatorSettings()
    average_opt_statistics: tuple[Annotated[str, Field(min_length=1)], ...] = shared(
        (), "optimizer statistics averaged with parameters: [exp_avg_sq]"
    )


_LOW_RANK = {"method": ("powersgd", "poweref")}
_SPARSE = {"method": ("topk",)}


class GradientAveragingSettings(Section):
    """In which form peers send their gradients."""

    method: Literal["plain", "powersgd", "poweref", "topk"] = shared("plain", "in which form gradients travel")
    rank: int = shared(32, "columns of the two matrices", of=_LOW_RANK, ge=1, le=1024)
    min_compression_ratio: float = shared(
        0.5, "least saving, as a fraction; other tensors travel whole", of=_LOW_RANK, ge=0, lt=1
    )
    k: int = shared(64, "numbers of each 4,096 that travel", of=_SPARSE, ge=32, le=256)
    bits: Literal[1, 2, 4, 8] = shared(2, "of each number; its place takes about 8 more", of=_SPARSE)
    decay: float = shared(0.95, "share of the unsent rest that is kept", of=_SPARSE, ge=0, le=1)


class DelaySettings(Section):
    """Which work goes on in the background while trainers compute. Gradients are then one update old."""

    grad_averaging: bool = shared(False, "train on while gradients are averaged")
    optimizer_step: bool | None = shared(None, "train on while the optimizer steps; null: as grad_averaging")
    state_averaging: bool = shared(True, "train on while parameters are averaged")

    @property
    def step(self) -> bool:
        """Whether the optimizer steps while the trainer computes."""
        return self.grad_averaging if self.optimizer_step is None else self.optimizer_step


class LocalUpdateSettings(Section):
    """Steps of each peer's own between averages."""

    enabled: bool = shared(False, "step after every batch, average parameters each epoch")


_OUTER = {"optimizer": ("sgd", "nesterov", "adam")}


class OuterSettings(Section):
    """Outer steps: each peer steps by itself, and a round averages how far the peers went."""

    optimizer: Literal["nesterov", "sgd", "adam"] | None = shared(None, "steps the common anchor; null: no outer steps")
    lr: float | None = shared(None, "null: sgd 1, nesterov 0.7, adam 0.1", of=_OUTER, gt=0)
    momentum: float | None = shared(None, "null: sgd 0, else 0.9", of=_OUTER, ge=0, lt=1)
    inner_batch_size: int = shared(0, "samples of a peer's own step, a multiple of micro_batch_size", of=_OUTER, ge=0)

    @property
    def has_momentum(self) -> bool:
        """Whether the outer optimizer has a momentum; Adam has, whatever its betas are."""
        usual = self.momentum is None and self.optimizer == "nesterov"
        return usual or self.optimizer == "adam" or bool(self.momentum)

    @property
    def takes_steps(self) -> bool:
        """Whether the run takes outer steps."""
        return self.optimizer is not None


class CompressionSettings(Section):
    """In which form tensors travel; docs/compression.md has the error of each."""

    gradients: GradientCodec = shared("none", "of gradients, and differences of outer steps")
    state_averaging: Codec = shared("none", "of averaged parameters; no blockwise_4bit")
    state_download: Codec = shared("none", "of a newcomer's state, which it changes a little; no blockwise_4bit")


class SiteSettings(Section):
    """Processes that train together behind one peer, on one machine or on several."""

    processes: int = own(1, "processes of this peer; 1: no site", ge=1, le=1024)
    zero: bool = own(False, "each process keeps its share of optimizer statistics")
    timeout: float = own(60.0, "seconds of a process's silence, at most", gt=0)


class LocalSettings(Section):
    """Each volunteer's choices for the own machine. Nothing of them is compared with others."""

    device: str = own(
        "auto", "cpu, cuda, cuda:1, mps; auto: the first of cuda, mps, cpu", pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = own(
        "auto", "auto: bfloat16 autocast if CUDA has it, else float32; float16: with loss scaling"
    )
    matmul_precision: Literal["highest", "high", "medium"] = own(
        "highest", "of float32 matrices: highest, or high (TF32), medium (bfloat16)"
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None = own(
        None, "null: transformers' choice"
    )
    torch_compile: bool = own(False, "compile the model if torch can")
    base_dtype: Literal["bfloat16", "float32"] = own("bfloat16", "of an adapter's base: bfloat16 or float32")
    threads: int | None = own(None, "per process; null: trainers share the cores", ge=1)
    micro_batch_size: int | None = own(None, "in place of the run's", ge=1)
    gradient_accumulation_steps: int | None = own(None, "in place of the run's", ge=1)
    shuffle_buffer_size: int = own(16384, "sequences shuffled together, at most", ge=1, le=1 << 20)
    data_dir: OwnPath | None = own(None, "where paths of datasets begin; null: beside the recipe")
    name: str | None = own(None, "on the dashboard; null: the short peer id", max_length=64)
    team: str | None = own(None, "for which the contribution counts", max_length=64)
    client_mode: bool = own(False, "never listen")
    port_mapping: bool = own(True, "ask the router for a port")
    relay: bool | None = own(None, "pass on others' connections; null: monitors and auxiliaries do")
    relay_rate: float | None = own(None, "bytes per second, at most; null: 32 million", gt=0)
    host: str | None = own(None, "address to listen on; null: all", min_length=1)
    port: int = own(0, "port to listen on; 0: any free one", ge=0, le=65535)
    announce_addresses: tuple[AddressText, ...] = own((), "where others can dial; []: found out")
    identity_path: OwnPath | None = own(None, "key file; null: in the peer's directory")
    bandwidth: float | None = own(None, "share of the reducing, relative to others; 0: none", ge=0, le=1e12)
    offload_optimizer: bool = own(False, "keep the optimizer in host memory")
    journal_size: JournalSize = own(500_000_000, "bytes of the journal, at most: 500 MB")
    webhook: Annotated[str, AfterValidator(_check_webhook)] | None = own(
        None, "address that alerts are posted to, as JSON"
    )
    check_memory: bool = own(True, "refuse a model that is too large for this machine")
    trust_remote_code: bool = own(False, "run Python code in a local checkpoint directory")
    site: SiteSettings = SiteSettings()
    limits: Limits = Limits()
