"""Groups with hostile members drawn by lot, and what must hold of the honest ones whatever these do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.control import RoundResult
from swarmcli.errors import SwarmError
from tests.adversary.lies import Layer, Liar, draw
from tests.averaging.averagers import Averagers, Peer

LAYERS: tuple[Layer, ...] = ("network", "hash table", "matchmaking", "parts", "votes", "audits", "gradients")
OPTIONS = AllreduceOptions(part_size_bytes=2 << 10, allreduce_timeout=30.0)
SHAPES = ((40, 50), (7,))
LONGEST = 240.0  # seconds of virtual time for one round, whatever the liars do


@dataclass
class Draw:
    """What became of a few rounds of one group."""

    lies: list[str]
    applied: list[dict[bytes, set[bytes]]] = field(default_factory=list)  # of each round: id → unlike results of honest
    committed: list[int] = field(default_factory=list)  # of each round: how many honest ones have a result
    seconds: list[float] = field(default_factory=list)

    @property
    def unlike(self) -> int:
        """Rounds for which two honest members applied different results."""
        return sum(len(results) > 1 for applied in self.applied for results in applied.values())


async def play(seed: int, members: int, hostile: int, rounds: int = 2) -> Draw:
    """Rounds of a group in which so many members lie, each in one or two drawn ways."""
    dice = random.Random(seed)
    async with Averagers(seed) as swarm:
        peers = await swarm.add(members, allreduce=OPTIONS, shapes=SHAPES)
        await _round(peers, [])  # all are honest: they come to know each other
        liars = dice.sample(peers, hostile)
        told = Draw([])
        for peer in liars:
            lies = draw(dice.randrange(1 << 30), dice.choice((1, 1, 2)), LAYERS)
            told.lies += [each.name for each in lies]
            liar = Liar(random.Random(dice.random()), peer.endpoint, peer.node, peer.core)
            for each in lies:
                each.tell(liar)
        honest = [peer for peer in peers if peer not in liars]
        for _ in range(rounds):
            began = asyncio.get_running_loop().time()
            results = await _round(honest, liars)
            told.seconds.append(asyncio.get_running_loop().time() - began)
            told.applied.append(_applied(honest, results))
            told.committed.append(sum(result is not None for result in results))
        return told


async def _round(honest: Sequence[Peer], liars: Sequence[Peer]) -> list[RoundResult | None]:
    lied = [peer.begin(timeout=LONGEST) for peer in liars]
    controls = [peer.begin(timeout=LONGEST, allow_retries=True) for peer in honest]
    outcomes = await asyncio.gather(*controls, return_exceptions=True)
    for control in lied:
        control.cancel()
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, SwarmError):
            raise outcome
    return [outcome if isinstance(outcome, RoundResult) else None for outcome in outcomes]


def _applied(honest: Sequence[Peer], results: Sequence[RoundResult | None]) -> dict[bytes, set[bytes]]:
    """Round → hashes of the tensors that honest members hold after it."""
    applied: dict[bytes, set[bytes]] = {}
    for peer, result in zip(honest, results, strict=True):
        if result is not None and result.total_weight > 0:
            held = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in peer.core._tensors)
            applied.setdefault(result.group.group_id, set()).add(held)
    return applied
