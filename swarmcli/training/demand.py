"""Estimates what a run will ask of a computer: by the recipe and the model's outline, before anything is downloaded.

The contact says how many epochs there are in an hour, and who takes part; a further trainer shortens epochs, taken for
as fast as the others. A round is then divided as its leader would divide it among peers with equal links that all can
dial. Where the contact does not say it, an epoch takes a minute, and traffic is told from above: in an all-reduce
nobody sends or receives more than twice what is averaged, but an auxiliary, which does so for each trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from swarmcli.averaging.group import Member
from swarmcli.averaging.shares import reducing_shares
from swarmcli.network.identity import PeerID
from swarmcli.optim.config import Role
from swarmcli.recipe import Recipe
from swarmcli.recipe.offered import UNKNOWN, Going
from swarmcli.training.device import Compute
from swarmcli.training.freezing import frozen_bytes, stored_bytes
from swarmcli.training.memory import (
    Need,
    averaged_numbers,
    memory_needs,
    sizes,
    statistics_of,
    statistics_that_travel,
)

WIDTHS = {  # bytes of a number on the wire, with the scales of its block
    "none": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "scaled_float16": 2.0,
    "uniform_8bit": 1.02,
    "quantile_8bit": 1.02,
    "blockwise_8bit": 1.02,
    "blockwise_4bit": 0.57,
}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """An estimate goes by these where nobody has told."""

    pace: float = 60.0  # seconds of an epoch
    members: int = 64  # of a group at most: more change nothing in what each passes on
    numbers: int = 1 << 20  # that a group averages, and divides into shares


ASSUMED = Assumptions()


@dataclass(frozen=True, slots=True)
class Demand:
    """Sizes are bytes."""

    parameters: int
    trained: int  # of them
    needs: tuple[Need, ...]  # of memory
    round: int  # that a trainer sends in a round; as much is received
    sent: int  # for each epoch
    received: int
    peers_are_told: bool  # by the contact; otherwise what is sent and received is no estimate but the most
    told_pace: float  # seconds of an epoch without this peer, by the contact; 0: not told
    pace: float  # seconds of an epoch with this peer, by what was told; otherwise assumed
    state: int  # downloaded once when joining
    frozen: int  # likewise, by a peer that has others; with the state in a checkpoint

    def an_hour(self, nbytes: int) -> int:
        """Bytes in an hour, of so many in an epoch."""
        return int(nbytes * 3600 / self.pace)


def demand_of(recipe: Recipe, outline: nn.Module, role: Role, compute: Compute, going: Going = UNKNOWN) -> Demand:
    """`going`: what the contact says of the run."""
    (model, trained), frozen = sizes(outline), frozen_bytes(outline)
    averaged = averaged_bytes(recipe, outline)
    told = going.trainers + going.monitors + going.auxiliaries > 0
    sent, received = passed_on(going, role, recipe.averaging.target_group_size) if told else (2.0, 2.0)
    pace = going.epoch_seconds
    if role == "trainer" and told:
        pace *= going.trainers / (going.trainers + 1) if going.trainers else 1.0
    return Demand(
        parameters=sum(parameter.numel() for parameter in outline.parameters()),
        trained=sum(parameter.numel() for parameter in outline.parameters() if parameter.requires_grad),
        needs=tuple(memory_needs(recipe, outline, role, compute)),
        round=averaged,
        sent=int(sent * averaged),
        received=int(received * averaged),
        peers_are_told=told,
        pace=pace or ASSUMED.pace,
        told_pace=going.epoch_seconds,
        state=0
        if role == "auxiliary"
        else model - frozen + statistics_that_travel(recipe, trained, trained * statistics_of(recipe)),
        frozen=0 if role == "auxiliary" else stored_bytes(recipe, outline),
    )


def passed_on(going: Going, role: Role, group_size: int | None) -> tuple[float, float]:
    """A further peer in this role sends and receives so much in a round, in units of what is averaged."""
    there = {"trainer": going.trainers, "monitor": going.monitors, "auxiliary": going.auxiliaries}
    most = min(group_size or ASSUMED.members, ASSUMED.members) - 1
    part = min(1.0, most / sum(there.values()))
    counts = {each: math.ceil(count * part) for each, count in there.items()}  # of its own group
    counts[role] += 1
    roles = [each for each, count in counts.items() for _ in range(count)]
    members = [Member(PeerID(bytes(32)), auxiliary=each == "auxiliary") for each in roles]
    own = reducing_shares(members, ASSUMED.numbers)[roles.index(role)]
    keeps, computes = role != "auxiliary", role == "trainer"  # what was averaged; gradients of its own
    holders, senders = counts["trainer"] + counts["monitor"], counts["trainer"]
    sent = computes * (1 - own) + own * (holders - keeps)
    return sent, keeps * (1 - own) + own * (senders - computes)


def averaged_bytes(recipe: Recipe, outline: nn.Module) -> int:
    """One peer brings so many bytes into the average of an epoch, as they travel."""
    numbers = averaged_numbers(recipe, outline)
    if recipe.local_updates.enabled:
        copies = 1 + len(recipe.averaging.average_opt_statistics)
        return int(numbers * copies * WIDTHS[recipe.compression.state_averaging])
    return int(numbers * WIDTHS[recipe.compression.gradients])
