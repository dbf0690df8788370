"""Estimates how much memory a peer of a run will need, before it takes any, and compares that with what its machine
has.

In units of the parameters the sums are those of docs/optimizer.md; what a forward pass keeps for the backward pass is a
rule of thumb for transformers, exact to some tens of percent. With 85 million parameters and AdamW the estimates are
3.9 GiB for a trainer, 4.9 for a monitor and 0.75 for an auxiliary; the peaks that were measured are 3.2 (nobody
downloaded from it: 1.0 less), 4.1 and 0.6 (it reduced a share of the round). With half a million parameters they are
590, 565 and 442 MiB, and the peaks 617, 541 and 478 (benchmarks/NOTES.md). So an estimate says whether a model fits,
not by how much.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from swarmcli.errors import RecipeError
from swarmcli.machine.registry import LocalPeers
from swarmcli.machine.sensors import memory_of
from swarmcli.optim.config import Role
from swarmcli.optim.gradients.low_rank_methods import Rank
from swarmcli.recipe import Limits, Recipe
from swarmcli.recipe.limits import amount_of
from swarmcli.recipe.optimizers import OPTIMIZERS
from swarmcli.training.device import Compute
from swarmcli.training.freezing import frozen_bytes
from swarmcli.words import format_size

NO_LIMITS = Limits()


# bytes, as they were measured
PROGRAM = 540 << 20  # bytes that Python, torch and transformers take before there is a model
PROGRAM_WITHOUT_MODEL = 440 << 20  # the same without transformers
CUDA = 500 << 20  # bytes that a CUDA context takes on the device
# What a layer keeps of each token for the backward pass, in bytes, in float32: HIDDEN for each unit of the hidden size
# (measured: 60 to 116; OPT, GPT-NeoX, Qwen2, Llama, Gemma, GPT-2), and if its attention has dropout PAIR for each head
# and pair of tokens. The loss keeps WORD for each token and word of the vocabulary: the logits, their softmax and their
# gradient.
HIDDEN, PAIR, WORD = 116, 12, 12
# With an adapter a layer keeps this share of that: 0.33 to 0.62 (Llama, Qwen3, GPT-2; the upper end counts, since
# loading the base takes memory too), with an adapter at every matrix 0.56 to 0.76. A base in float32 adds EXACT: 0.86
# (GPT-2).
ADAPTED, EXACT, ADAPTED_EVERYWHERE = 0.6, 0.35, 0.25


@dataclass(frozen=True)
class Need:
    """One line of the sum."""

    what: str
    nbytes: int
    on_device: bool = False  # if the peer is a trainer with CUDA; otherwise in host memory


@dataclass(frozen=True)
class Room:
    """A memory, in bytes."""

    name: str
    total: int
    free: int  # or used by this process already
    others: int = 0  # taken by this user's other peers, with which this peer shares the user's limit


def check_memory(
    recipe: Recipe, outline: nn.Module, role: Role, compute: Compute, *, limits: Limits = NO_LIMITS, now: bool = True
) -> str:
    """Says how much this peer needs, of how much. To be called before the model is built; `outline` has its shapes.

    Raises RecipeError, with each line of the sum, if that is more than is free (without `now`: more than there is at
    all), or more than the user lends; unless `local.check_memory` is false.
    """
    needs = memory_needs(recipe, outline, role, compute)
    told = []
    for room in rooms(compute):
        here = [need for need in needs if need.on_device == (room.name != HOST)]
        total = sum(need.nbytes for need in here)
        if recipe.local.check_memory and (lack := _lack(room, total, limits, now)):
            raise RecipeError(
                f"{recipe.origin('base_model')}: base_model: as a {role} it needs about {format_size(total)} of "
                f"{room.name}, {lack}:\n"
                + "".join(f"  {format_size(need.nbytes):>9}  {need.what}\n" for need in here)
                + "take a smaller model, micro_batch_size or sequence_len, or another machine; with "
                "local.check_memory: false it is tried all the same"
            )
        told.append(f"{format_size(total)} of the {format_size(room.total)} of {room.name}")
    return " and ".join(told)


def _lack(room: Room, needed: int, limits: Limits, now: bool) -> str:
    """Says of what there is too little; "": of nothing."""
    if needed > (room.free if now else room.total):
        return f"which has {format_size(room.total)}, {format_size(room.free)} of them free"
    lent = amount_of(limits.memory, room.total) if room.name == HOST else None
    if lent is None or needed <= lent - (taken := room.others if now else 0):
        return ""
    beside = f", and your other peers take {format_size(taken)}" if taken else ""
    return f"of which you lend {format_size(int(lent))}{beside} (`swarm limits set memory=…` changes that)"


def memory_needs(recipe: Recipe, outline: nn.Module, role: Role, compute: Compute) -> list[Need]:
    """Returns what all processes of this peer on this machine need together. `outline`: the model, or its shapes on the
    meta device."""
    # Only the processes of a site that run on this machine count.
    of_site = int(os.environ.get("LOCAL_WORLD_SIZE", recipe.local.site.processes))
    processes = of_site if role == "trainer" else 1
    on_device = role == "trainer" and compute.device.type == "cuda"
    needs = of_auxiliary(recipe, outline) if role == "auxiliary" else of_member(recipe, outline, role, compute)
    # Each process of a site has a CUDA device of its own; in host memory they are side by side.
    return [
        Need(need.what, need.nbytes, True) if need.on_device and on_device else Need(need.what, need.nbytes * processes)
        for need in needs
        if need.nbytes
    ]


def of_member(recipe: Recipe, outline: nn.Module, role: Role, compute: Compute) -> list[Need]:
    """Returns what a trainer or a monitor needs. Both hold the state; a trainer trains besides, and a monitor writes
    checkpoints."""
    (model, trained), frozen, trains = sizes_held(recipe, outline), frozen_bytes(outline), role == "trainer"
    outer, site, offloaded = recipe.outer, recipe.local.site, trains and recipe.offloaded
    statistics = trained * statistics_of(recipe) // (site.processes if trains and site.zero else 1)
    travels = statistics_that_travel(recipe, trained, statistics)
    # A trainer that steps after each micro-batch sums nothing up, and neither does a monitor if trainers step.
    steps = recipe.local_updates.enabled or (
        outer.inner_batch_size == recipe.micro_batch if trains else outer.takes_steps
    )
    own = statistics if trains else 0 if outer.takes_steps else travels
    saved = 0 if trains else trained if recipe.adapter else model
    kept = activation_bytes(recipe, outline, compute) if trains else 0
    return [
        Need("Python, torch and transformers", PROGRAM),
        Need("CUDA itself", CUDA if trains and compute.device.type == "cuda" else 0, True),
        Need("parameters", model, True),
        Need("gradients", trained if trains else 0, True),
        Need("what the forward pass keeps for the backward pass", kept, True),
        Need("sums of gradients", 0 if steps else trained, True),
        Need(f"statistics of {recipe.optimizer.name}", own, not offloaded),
        *outer_needs(recipe, trained),
        Need("parameters for the optimizer", trained if offloaded else 0),
        *round_needs(recipe, trained),
        Need("a copy of the state, while somebody downloads it", sizes(outline)[0] - frozen + travels),
        Need(
            "a copy of frozen weights, while somebody downloads them",
            frozen if trains and compute.device.type != "cpu" and not recipe.adapter else 0,
        ),
        Need("copies of the state for a checkpoint", saved and saved + travels + max(saved, travels)),
    ]


def outer_needs(recipe: Recipe, trained: int) -> list[Need]:
    """Returns what outer steps need in host memory: the anchor, and the parameters as they were when the difference was
    handed in."""
    if recipe.local_updates.enabled:
        return [Need("the anchor of local updates, twice", 2 * trained)]
    if not recipe.outer.takes_steps:
        return []
    return [
        Need("the anchor of outer steps, twice", 2 * trained),
        Need(f"statistics of {recipe.outer.optimizer}", statistics_that_travel(recipe, trained, 0)),
    ]


def statistics_that_travel(recipe: Recipe, trained: int, inner: int) -> int:
    """Returns the bytes of statistics in a state: those of the outer optimizer, or where there is none the `inner`
    ones."""
    if not recipe.outer.takes_steps:
        return inner
    moments = 2 if recipe.outer.optimizer == "adam" else int(recipe.outer.has_momentum)
    return trained * (moments + bool(recipe.ema_decay))


def of_auxiliary(recipe: Recipe, outline: nn.Module) -> list[Need]:
    return [
        Need("Python and torch", PROGRAM_WITHOUT_MODEL),
        Need("averages that it may have to compute alone", 4 * averaged_numbers(recipe, outline)),
    ]


def averaged_shapes(recipe: Recipe, outline: nn.Module) -> list[tuple[int, ...]]:
    """Returns the shapes of the gradients or parameters (float32) in a round; PowerSGD and PowerEF send two thin
    matrices in place of a large one, where that saves enough (docs/powersgd.md)."""
    method, shapes = recipe.gradient_averaging, [tuple(p.shape) for p in outline.parameters() if p.requires_grad]
    if method.method in ("plain", "topk") or recipe.local_updates.enabled:
        return shapes
    rank = Rank(method.rank, method.min_compression_ratio)
    thin = [(shape, rank.matrix(shape)) for shape in shapes]
    return [
        part
        for shape, matrix in thin
        for part in ([shape] if matrix is None else [(side, min(rank.averager_rank, *matrix)) for side in matrix])
    ]


def averaged_numbers(recipe: Recipe, outline: nn.Module) -> int:
    """How many numbers a round averages."""
    return sum(map(math.prod, averaged_shapes(recipe, outline)))


def round_needs(recipe: Recipe, trained: int) -> list[Need]:
    """Returns what a round needs: room for what it averages, before and after."""
    riders = 2 * len(recipe.averaging.average_opt_statistics) if recipe.local_updates.enabled else 0
    beside = {
        "plain": ["averages of a round"],
        "topk": ["residuals", "messages of the largest gradients", "averages of a round"],
    }.get(recipe.gradient_averaging.method, ["residuals or estimates"])
    needs = [Need(what, trained) for what in ("mean gradients", *beside)]
    return [*needs, Need("averaged statistics, twice", riders * trained)]


def sizes(outline: nn.Module) -> tuple[int, int]:
    """Bytes of the whole model and of what is trained. Tied weights count once."""
    model = sum(tensor.nbytes for tensor in [*outline.parameters(), *outline.buffers()])
    return model, sum(parameter.nbytes for parameter in outline.parameters() if parameter.requires_grad)


def sizes_held(recipe: Recipe, outline: nn.Module) -> tuple[int, int]:
    """Returns the same as this computer holds them: a quantized base has its matrices in 8 or 4 bits, with the scales
    of their blocks. The matrix of words stays as it is."""
    model, trained = sizes(outline)
    if not (recipe.load_in_8bit or recipe.load_in_4bit):
        return model, trained
    words = sizes_of_config(outline).get("vocab_size")
    frozen = [each for each in outline.parameters() if not each.requires_grad]
    matrices = sum(each.nbytes for each in frozen if each.ndim == 2 and each.shape[0] != words)
    return model - int(matrices * (0.48 if recipe.load_in_8bit else 0.72)), trained


def statistics_of(recipe: Recipe) -> int:
    """How many numbers the optimizer keeps for each parameter, an average over epochs among them."""
    kind, settings = OPTIMIZERS[recipe.optimizer.name], recipe.optimizer
    unused = {
        "momentum_buffer": "momentum" in kind.keys and not settings.momentum,
        "grad_avg": not settings.args.get("centered"),
    }
    averages = recipe.ema_decay > 0 and not recipe.outer.takes_steps
    return sum(not unused.get(name) for name in kind.statistics) + averages


SIZES = (
    "num_hidden_layers", "num_attention_heads", "attn_pdrop", "attention_dropout", "hidden_size", "vocab_size",
    "image_size", "patch_size",
)  # fmt: skip


def sizes_of_config(model: nn.Module) -> dict[str, float]:
    """Returns those numbers of a model's config from which its activations are estimated."""
    config = getattr(model, "config", None)
    return {name: value for name in SIZES if isinstance(value := getattr(config, name, None), int | float)}


def activation_bytes(recipe: Recipe, outline: nn.Module, compute: Compute) -> int:
    """Estimates what a forward pass of a transformer keeps for the backward pass. Sizes that a model's config does not
    tell count as 0, so a model that reads neither tokens nor patches is taken to need no memory here."""
    sizes = sizes_of_config(outline)

    def told(*names: str) -> float:
        return next((sizes[name] for name in names if name in sizes), 0)

    # An image is a sequence of its patches, and one token for the whole.
    patches = int(told("image_size") // told("patch_size")) ** 2 + 1 if told("patch_size") else 0
    sequence, layers = recipe.sequence_len or patches, told("num_hidden_layers")
    pairs = told("num_attention_heads") * sequence if told("attn_pdrop", "attention_dropout") else 0
    of_layer = HIDDEN * told("hidden_size") + PAIR * pairs
    # With checkpointing each layer keeps its input, in float32; one layer at a time keeps the rest.
    kept = of_layer + layers * 4 * told("hidden_size") if recipe.gradient_checkpointing else layers * of_layer
    width = words = 0.5 if compute.autocast_dtype is not None else 1.0
    if recipe.adapter is not None:
        # A layer that is not trained does not keep its input, and an adapter keeps it in float32. The loss computes in
        # float32, as without an adapter.
        width = ADAPTED + (0.0 if recipe.local.base_dtype == "bfloat16" else EXACT)
        width += ADAPTED_EVERYWHERE if recipe.lora_target_modules == "all-linear" else 0.0
    return int(recipe.micro_batch * sequence * (kept * width + WORD * told("vocab_size") * words))


# the machine

HOST = "this machine's memory"


def rooms(compute: Compute) -> Sequence[Room]:
    """Host memory, and that of a CUDA device. Other accelerators share the host's."""
    if compute.device.type != "cuda":
        return [host_room()]
    free, total = torch.cuda.mem_get_info(compute.device)
    return [host_room(), Room(f"the memory of {compute.device}", total, free)]


def host_room() -> Room:
    """Returns the memory of the machine, or of the control groups that confine this process."""
    memory, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
    limits = [(memory.total, memory.available), *cgroup_limits()]
    total, free = (min(values) for values in zip(*limits, strict=True))
    others = 0  # bytes that processes of other peers of this user take
    with suppress(OSError):
        others = sum(memory_of(each.pid) or 0 for each in LocalPeers().living() if each.pid != os.getpid())
    return Room(HOST, total, min(total, free + own), others)


def cgroup_limits(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[int, int]]:
    """Yields limit and free bytes of each control group around this process that has a limit, of version 1 and 2."""
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:  # not Linux
        return
    for _, controllers, path in lines:
        if controllers not in ("", "memory"):
            continue
        first, used = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        )
        inner = mount / controllers / path.lstrip("/")
        # Within a container the path may be the host's; the container's own group is the root of the mount then.
        for group in [inner, *inner.parents]:
            if group.is_relative_to(mount / controllers) and (found := _limit(group, first, used)):
                yield found


def _limit(group: Path, limit: str, used: str) -> tuple[int, int] | None:
    try:
        most, taken = int((group / limit).read_text()), int((group / used).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max": no limit
        return None
    # the kernel gives this back when memory is wanted
    cached = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
    return most, most - taken + cached
