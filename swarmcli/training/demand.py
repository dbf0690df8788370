"""Estimates what a run will ask of a computer, from the recipe and the model's outline, before anything is downloaded.

The contact says how long an epoch takes, and who takes part. A further trainer is taken to be as fast as the others,
and shortens epochs. Parts of a round are divided as its leader would divide them among peers with equal lines that can
all be dialed. If the contact does not say who is there, traffic is an upper bound: in an all-reduce nobody sends or
receives more than twice what is averaged, except an auxiliary, which does so for each trainer. An average of sparse
gradients is larger than a trainer's message, the more so the more trainers there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from swarmcli.averaging.group import Member
from swarmcli.averaging.shares import reducing_shares
from swarmcli.compression import (
    BFloat16Compression,
    BlockwiseQuantization,
    CompressionBase,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    TensorDescriptor,
    TopK,
    Uniform8BitQuantization,
)
from swarmcli.network.identity import PeerID
from swarmcli.optim.config import Role
from swarmcli.recipe import Recipe
from swarmcli.recipe.offered import UNKNOWN, RunEstimate
from swarmcli.training.freezing import frozen_bytes, stored_bytes
from swarmcli.training.memory import (
    averaged_shapes,
    sizes,
    statistics_of,
    statistics_that_travel,
)

# Assumed where the contact says nothing.
_MEMBERS = 64  # members of a group, at most: more would not change what each sends
_NUMBERS = 1 << 20  # numbers that a group averages; only the ratio of its parts counts
COMPRESSIONS: Mapping[str, CompressionBase] = {  # by their names in recipes
    "none": NoCompression(),
    "float16": Float16Compression(),
    "bfloat16": BFloat16Compression(),
    "scaled_float16": ScaledFloat16Compression(),
    "uniform_8bit": Uniform8BitQuantization(),
    "quantile_8bit": Quantile8BitQuantization(),
    "blockwise_8bit": BlockwiseQuantization(),
    # small blocks: an outlier spoils its block more with four bits than with eight
    "blockwise_4bit": BlockwiseQuantization(64, bits=4),
}


@dataclass(frozen=True, slots=True)
class Demand:
    """Sizes are bytes."""

    parameters: int
    trained: int  # of them
    round: int  # what a trainer sends or receives in a round at most, whichever is more; seats are given by this
    message: int  # what a trainer brings into a round
    average: int  # what a round gives back, at most
    sent: int  # for each epoch
    received: int
    # whether the contact told how many peers there are; otherwise `sent` and `received` are upper bounds
    peers_are_told: bool
    told_pace: float  # seconds of an epoch without this peer, by the contact; 0: not told
    pace: float  # seconds of an epoch with this peer, by what was told; 0 likewise
    state: int  # downloaded once when joining
    frozen: int  # likewise, if this computer lacks the run's frozen weights; a checkpoint has them with the state

    def an_hour(self, nbytes: int) -> int:
        """Returns the bytes in an hour, if an epoch takes `nbytes`. Needs a pace that was told."""
        return int(nbytes * 3600 / self.pace)


def demand_of(recipe: Recipe, outline: nn.Module, role: Role, going: RunEstimate = UNKNOWN) -> Demand:
    """Estimates the demand of a peer in this role. `going`: what the contact says of the run."""
    (model, trained), frozen = sizes(outline), frozen_bytes(outline)
    told = going.trainers + going.monitors + going.auxiliaries > 0
    senders = going.trainers + (role == "trainer") if told else _MEMBERS
    message, average = averaged_bytes(recipe, outline, senders)
    sent = received = float(message + average)
    if told:
        sent, received = passed_on(going, role, recipe.averaging.target_group_size, message, average)
    pace = going.epoch_seconds
    if role == "trainer" and told:
        pace *= going.trainers / (going.trainers + 1) if going.trainers else 1.0
    return Demand(
        parameters=sum(parameter.numel() for parameter in outline.parameters()),
        trained=sum(parameter.numel() for parameter in outline.parameters() if parameter.requires_grad),
        round=max(averaged_bytes(recipe, outline, _MEMBERS)),
        message=message,
        average=average,
        sent=int(sent),
        received=int(received),
        peers_are_told=told,
        pace=pace,
        told_pace=going.epoch_seconds,
        state=0
        if role == "auxiliary"
        else model - frozen + statistics_that_travel(recipe, trained, trained * statistics_of(recipe)),
        frozen=0 if role == "auxiliary" else stored_bytes(recipe, outline),
    )


def passed_on(
    going: RunEstimate, role: Role, group_size: int | None, message: float = 1.0, average: float = 1.0
) -> tuple[float, float]:
    """Returns how much a further peer in this role sends and receives in a round, if each trainer brings a `message`
    and everybody gets the `average`."""
    there = {"trainer": going.trainers, "monitor": going.monitors, "auxiliary": going.auxiliaries}
    most = min(group_size or _MEMBERS, _MEMBERS) - 1
    part = min(1.0, most / sum(there.values()))
    counts = {each: math.ceil(count * part) for each, count in there.items()}  # of its own group
    counts[role] += 1
    roles = [each for each, count in counts.items() for _ in range(count)]
    members = [Member(PeerID(bytes(32)), auxiliary=each == "auxiliary") for each in roles]
    own = reducing_shares(members, _NUMBERS, back=average / max(1, message))[roles.index(role)]
    keeps, computes = role != "auxiliary", role == "trainer"  # `keeps` the average; `computes` gradients of its own
    holders, senders = counts["trainer"] + counts["monitor"], counts["trainer"]
    sent = computes * (1 - own) * message + own * (holders - keeps) * average
    return sent, keeps * (1 - own) * average + own * (senders - computes) * message


def averaged_bytes(recipe: Recipe, outline: nn.Module, senders: int) -> tuple[int, int]:
    """Returns sizes in bytes as they travel: of what one peer brings into the average of an epoch, and of the average
    of that many senders, at most."""
    method, compression = recipe.gradient_averaging, recipe.compression
    local = recipe.local_updates.enabled
    codec = COMPRESSIONS[compression.state_averaging if local else compression.gradients]
    if method.method == "topk":
        codec = TopK(method.k, method.bits)
    forms = [TensorDescriptor(shape, torch.float32) for shape in averaged_shapes(recipe, outline)]
    forms *= 1 + local * len(recipe.averaging.average_opt_statistics)
    return sum(map(codec.payload_bound, forms)), sum(codec.average_bound(each, senders) for each in forms)
