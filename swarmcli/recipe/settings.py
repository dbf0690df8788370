"""The sections of a recipe as typed values. What a field means stands in its description, from which docs/recipes.md
is made, and so does for which values of a key beside it it has a meaning. What else does not go together: `rules`."""

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
    """An absolute path: `~` is the home directory, and what is relative begins in `directory`."""
    return (directory / Path(text).expanduser()).resolve()


OptimizerName: TypeAlias = Literal[
    "adamw", "adam", "sgd", "muon", "adamax", "nadam", "radam", "adagrad", "adadelta", "adafactor", "rmsprop", "rprop",
    "asgd",
]  # fmt: skip
Codec: TypeAlias = Literal[
    "none", "float16", "bfloat16", "scaled_float16", "uniform_8bit", "quantile_8bit", "blockwise_8bit"
]
# Parameters have no four bits: what is rounded so coarsely must be small beside what it is added to.
GradientCodec: TypeAlias = Literal[Codec, "blockwise_4bit"]


def _optimizer_name(value: Any) -> Any:
    """torch writes AdamW, most recipes adamw. Raises ValueError for those of torchao, which no newcomer could go on
    with."""
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
    """Alerts tell of a run, and the address itself is often a password: neither travels in the clear."""
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

    name: Annotated[OptimizerName, BeforeValidator(_optimizer_name)] = shared("adamw", "which optimizer of torch")
    learning_rate: float = shared(1e-3, "the peak of the schedule", gt=0)
    weight_decay: float = shared(0.0, "decay of what the Trainer decays: all but biases and norms", ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = shared(
        (0.9, 0.999), "decay rates of the two moments", of={"name": _takers("betas")}
    )
    eps: float = shared(
        1e-8, "added to the denominator; of adagrad 1e-10, of adadelta 1e-6", of={"name": _takers("eps")}, gt=0
    )
    momentum: float = shared(0.0, "momentum; of muon 0.95", of={"name": _takers("momentum")}, ge=0, lt=1)
    args: Mapping[str, Any] = shared(
        {}, "further arguments as torch calls them, for example {nesterov: true}; none that is for a device"
    )
    max_grad_norm: float | None = shared(None, "the average gradient is scaled down to this norm; null: never", gt=0)
    max_grad_value: float | None = shared(None, "each number of the average gradient is cut to this; null: never", gt=0)

    @model_validator(mode="after")
    def _as_torch_has_it(self) -> OptimizerSettings:
        try:
            check_args(self.name, self.args)
        except ValueError as error:
            raise Conflict(("args", f"optimizer.args: {error}")) from None
        for key, usual in OPTIMIZERS[self.name].keys.items():
            if key not in self.model_fields_set:  # torch's default of this optimizer, by which peers compare as well
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

    name: Shape = shared("constant", "the shape behind the warm-up, by transformers' names")
    warmup_epochs: int = shared(0, "epochs in which the rate rises from 0, which the first one has, to its peak", ge=0)
    total_epochs: int | None = shared(
        None, "the epoch at which a shape that falls ends; null: max_epochs", of={"name": _FALLING}, ge=1
    )
    min_lr_ratio: float = shared(
        0.0, "where a shape that falls ends, as a fraction of learning_rate", of={"name": _FALLING}, ge=0, le=1
    )
    cycles: int = shared(1, "how often the rate begins anew", of={"name": ("cosine_with_restarts",)}, ge=1)
    power: float = shared(1.0, "of the polynomial", of={"name": ("polynomial",)}, gt=0)
    decay_epochs: int | None = shared(
        None, "the last epochs, in which the rate falls by half a cosine", of={"name": ("warmup_stable_decay",)}, ge=1
    )

    @property
    def ends(self) -> bool:
        """Whether the shape has an end at which it has fallen."""
        return self.name in _FALLING


class UploadSettings(Section):
    """Where on the Hugging Face Hub the model of a checkpoint goes."""

    repo: str | None = own(
        None,
        "owner/name on the Hugging Face Hub, to which whoever writes a checkpoint sends its model; null: none",
        pattern=f"^{ON_HUB.pattern}$",
    )
    private: bool = own(True, "whether only you see a repository that is made for it")
    when: Literal["each", "best"] = own("each", "each: after every checkpoint; best: when it evaluates better than all")


class CheckpointSettings(Section):
    every_epochs: int = advised(
        0, "write a checkpoint every so many epochs, unless another peer does; 0: only when leaving", ge=0
    )
    keep: int = own(3, "how many of the newest checkpoints stay on the disk", ge=1)
    keep_every: int = own(
        0, "of every so many epochs the first checkpoint stays for good, for example 1000; 0: none", ge=0
    )
    keep_best: int = own(1, "how many of those with the lowest evaluation loss stay as well", ge=0)
    upload: UploadSettings = UploadSettings()


class EvaluationSettings(Section):
    """Measuring the model on data that nobody trains on."""

    every_epochs: int = shared(0, "evaluate every so many epochs; 0: never", ge=0)
    samples: int = shared(256, "samples to evaluate on, or fewer if there are no more", ge=1)
    evaluator: PeerText | None = shared(
        None,
        "the peer id of a monitor of yours: it alone evaluates while it is there, and it alone ends the run "
        "(early_stopping_patience); null: one of the peers evaluates, a monitor before a trainer",
    )
    early_stopping_patience: int = shared(
        0, "the run ends when so many evaluations of the evaluator in a row were no better; 0: it does not", ge=0
    )
    early_stopping_threshold: float = shared(0.0, "by so much less the loss is better (early_stopping_patience)", ge=0)
    held_out: float = shared(
        0.0, "this share of the texts or rows of all datasets is kept for it: nobody trains on it", ge=0, le=0.5
    )
    dataset: Dataset | None = shared(None, "a dataset to evaluate on instead; its keys are those of datasets")


class NetworkSettings(Section):
    initial_peers: tuple[AddressText, ...] = own((), "addresses of first contacts: tcp://host:port or …/peer id")


class AggregatorSettings(Section):
    """How the members' gradients and parameters become one average; docs/security.md has what each withstands."""

    name: Literal["mean", "median", "trimmed_mean", "centered_clip"] | None = shared(
        None,
        "how parts become averages; null: mean where members only fail (trust), and with every "
        "gradient_averaging.method but plain, else centered_clip",
    )
    gate: float = shared(
        1000.0,
        "who has numbers above this many times those of the others is left out of a part",
        of={"name": ("mean",)},
        ge=1,
    )
    trim: float = shared(
        0.34,
        "this share of the smallest and of the largest numbers is cut off",
        of={"name": ("trimmed_mean",)},
        gt=0,
        lt=0.5,
    )
    radius: float = shared(
        1.0, "differences are clipped to this many times their median norm", of={"name": ("centered_clip",)}, gt=0
    )
    iterations: int = shared(
        3, "each begins with the average of the one before as its centre", of={"name": ("centered_clip",)}, ge=1, le=20
    )


class AveragingSettings(Section):
    """How peers meet and average. Times are upper bounds: a group that is complete starts at once."""

    matchmaking_time: float = advised(15.0, "seconds to look for others at most, when not everyone is there", gt=0)
    averaging_timeout: float = advised(60.0, "seconds after which an attempt to average is given up", gt=0)
    load_state_timeout: float = advised(600.0, "seconds after which a download that brings nothing is given up", gt=0)
    proceed_alone: bool = own(
        False, "train a model apart, instead of waiting, when the state of the others cannot be reached"
    )
    target_group_size: int | None = shared(
        None, "with more peers than that, several groups average side by side; null: all together", ge=2
    )
    seats_per_network: int | None = shared(
        16, "peers of one network (a /24 of IPv4, a /48 of IPv6) in one group, local ones aside; null: any number", ge=1
    )
    part_size_bytes: int = shared(
        1 << 20, "size of the parts that gradients are cut into, at most", ge=1024, le=8 << 20
    )
    trust: Literal["strangers", "members"] | None = shared(
        None,
        "strangers: a third of a group may lie about a round; members: they may only fail; null: members in a run with "
        "access: invite, else strangers",
    )
    max_share: float = shared(
        0.75,
        "share of the weight in a group of four or more that one peer may have; more does not count",
        gt=0,
        le=1,
    )
    audit: float = shared(
        0.005, "share of the averages that peers compute again before they count; more finds liars sooner", ge=0, le=1
    )
    average_state_every: int | None = shared(
        None, "epochs between averages of the parameters; null: every epoch with local updates, else never", ge=1
    )
    aggregator: AggregatorSettings = AggregatorSettings()
    average_opt_statistics: tuple[Annotated[str, Field(min_length=1)], ...] = shared(
        (), "statistics of the optimizer that are averaged with the parameters, for example [exp_avg_sq]"
    )


_LOW_RANK = {"method": ("powersgd", "poweref")}
_SPARSE = {"method": ("topk",)}


class GradientAveragingSettings(Section):
    """In which form peers send their gradients."""

    method: Literal["plain", "powersgd", "poweref", "topk"] = shared(
        "plain",
        "plain: the gradients themselves; powersgd, poweref: two thin matrices for each large one; topk: the largest "
        "in few bits, the others in later rounds",
    )
    rank: int = shared(32, "columns of these matrices", of=_LOW_RANK, ge=1, le=1024)
    min_compression_ratio: float = shared(
        0.5, "a tensor is sent whole unless it shrinks by more than this fraction", of=_LOW_RANK, ge=0, lt=1
    )
    k: int = shared(64, "numbers of each 4,096 that travel", of=_SPARSE, ge=32, le=256)
    bits: Literal[1, 2, 4, 8] = shared(2, "for the sign and size of each; its place takes about 8", of=_SPARSE)
    decay: float = shared(
        0.95, "share of what has not been sent that a round keeps for later ones", of=_SPARSE, ge=0, le=1
    )


class DelaySettings(Section):
    """Which work goes on in the background while trainers compute. Gradients are then one update behind."""

    grad_averaging: bool = shared(False, "trainers go on while gradients are averaged")
    optimizer_step: bool | None = shared(
        None, "trainers go on while the optimizer steps, in host memory; null: as grad_averaging"
    )
    state_averaging: bool = shared(True, "trainers go on while parameters are averaged")

    @property
    def step(self) -> bool:
        """Whether the optimizer steps while the trainer computes."""
        return self.grad_averaging if self.optimizer_step is None else self.optimizer_step


class LocalUpdateSettings(Section):
    """Steps of each peer's own between averages."""

    enabled: bool = shared(False, "each peer steps after every batch, and parameters are averaged once per epoch")


_OUTER = {"optimizer": ("sgd", "nesterov", "adam")}


class OuterSettings(Section):
    """Outer steps: each peer steps by itself, and a round averages how far the peers went."""

    optimizer: Literal["nesterov", "sgd", "adam"] | None = shared(
        None,
        "steps the anchor with the average of how far peers went by themselves; null: gradients are averaged",
    )
    lr: float | None = shared(
        None, "learning rate of the outer optimizer; null: 1 of sgd, 0.7 of nesterov, 0.1 of adam", of=_OUTER, gt=0
    )
    momentum: float | None = shared(
        None, "of the outer optimizer, for adam its first beta; null: 0 of sgd, otherwise 0.9", of=_OUTER, ge=0, lt=1
    )
    inner_batch_size: int = shared(
        0, "samples of a peer's own step, a multiple of micro_batch_size; outer.optimizer needs it", of=_OUTER, ge=0
    )

    @property
    def has_momentum(self) -> bool:
        """Whether the outer optimizer keeps one; Adam does, whatever its betas are."""
        usual = self.momentum is None and self.optimizer == "nesterov"
        return usual or self.optimizer == "adam" or bool(self.momentum)

    @property
    def takes_steps(self) -> bool:
        """Whether the run takes outer steps."""
        return self.optimizer is not None


class CompressionSettings(Section):
    """In which form tensors travel; docs/compression.md has the error of each."""

    gradients: GradientCodec = shared("none", "how gradients travel, and differences of outer steps")
    state_averaging: Codec = shared("none", "how parameters travel when they are averaged")
    state_download: Codec = shared(
        "none", "how a newcomer's state travels; anything but none leaves it with slightly other parameters"
    )


class SiteSettings(Section):
    """Processes that train together behind one peer, on one machine or on several."""

    processes: int = own(
        1, "how many processes are one peer; 1: no site (`--nproc` and torchrun say it too)", ge=1, le=1024
    )
    zero: bool = own(False, "each process keeps and steps its share of the optimizer's statistics, and no more")
    timeout: float = own(60.0, "seconds of silence after which a process of the site is taken for broken", gt=0)


class LocalSettings(Section):
    """Each volunteer's choices for the own machine. Nothing of them is compared with others."""

    device: str = own(
        "auto", "auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps", pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = own(
        "auto",
        "what is computed in: auto is bfloat16 autocast on CUDA devices that have it, else float32; float16 (T4) "
        "scales losses",
    )
    matmul_precision: Literal["highest", "high", "medium"] = own(
        "highest", "how exactly float32 matrices are multiplied: high and medium are TF32 and bfloat16 where they are"
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None = own(
        None, "how attention is computed; null: as transformers chooses"
    )
    torch_compile: bool = own(False, "compile the model for this machine; where torch cannot, it says why and goes on")
    base_dtype: Literal["bfloat16", "float32"] = own(
        "bfloat16", "how the base of an adapter is held: float32 is faster on processors without bfloat16"
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
    team: str | None = own(None, "the team for which this peer's contribution counts; null: none", max_length=64)
    client_mode: bool = own(False, "never listen: for machines that cannot be dialed")
    port_mapping: bool = own(True, "ask the router for a port where nobody can dial this machine")
    relay: bool | None = own(
        None,
        "pass on the connections of peers that nobody can dial; null: monitors and auxiliaries do, trainers do not",
    )
    relay_rate: float | None = own(None, "bytes per second that are passed on, at most; null: 32 million", gt=0)
    host: str | None = own(
        None, "the address to listen on; null: all of this machine, IPv4 and IPv6; 0.0.0.0: all of IPv4", min_length=1
    )
    port: int = own(0, "the port to listen on; 0: any free one", ge=0, le=65535)
    announce_addresses: tuple[AddressText, ...] = own(
        (), "where others can dial this peer, which is checked; empty: found out"
    )
    identity_path: OwnPath | None = own(None, "the key file of this peer; null: in its directory below output_dir")
    bandwidth: float | None = own(
        None, "share of the reducing work, relative to other peers; 0: none; null: as the others", ge=0, le=1e12
    )
    offload_optimizer: bool = own(
        False, "keep the optimizer and a copy of the parameters in host memory; a delayed step does so anyway"
    )
    journal_size: JournalSize = own(
        500_000_000, "bytes that the journal takes at most, for example 500 MB; the oldest rows give way, sums stay"
    )
    webhook: Annotated[str, AfterValidator(_check_webhook)] | None = own(
        None, "an address to which alerts are posted as JSON: https, or http on this computer; null: none"
    )
    check_memory: bool = own(True, "refuse a model for which this machine has too little memory; false: try it anyway")
    trust_remote_code: bool = own(False, "let a local checkpoint directory run Python code that lies in it")
    site: SiteSettings = SiteSettings()
    limits: Limits = Limits()
