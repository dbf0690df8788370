"""Hostile members drawn by lot, on all layers of averaging at once: no two honest members ever apply unlike results."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from tests.adversary.lies import Layer, Liar, draw
from tests.averaging.averagers import Averagers, Peer, all_outcomes
from tests.simulation import simulated
from tests.suites import soak

LAYERS: tuple[Layer, ...] = ("parts", "votes", "audits", "gradients")
OPTIONS = AllreduceOptions(part_size_bytes=2 << 10, allreduce_timeout=30.0)
SHAPES = ((40, 50), (7,))
LONGEST = 240.0  # seconds of virtual time for one round, whatever the liars do


@dataclass
class Draw:
    """What became of a few rounds of one group."""

    lies: list[str]
    unlike: int = 0  # rounds for which two honest members applied different results
    committed: list[int] = field(default_factory=list)  # of each round: how many honest ones have a result


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
            results = await _round(honest, liars)
            told.unlike += sum(len(unlike) > 1 for unlike in _applied(honest, results).values())
            told.committed.append(sum(result is not None for result in results))
        return told


async def _round(honest: Sequence[Peer], liars: Sequence[Peer]) -> list[RoundResult | None]:
    lied = [peer.begin(timeout=LONGEST) for peer in liars]
    controls = [peer.begin(timeout=LONGEST, allow_retries=True) for peer in honest]
    outcomes = await all_outcomes(controls)
    for control in lied:
        control.cancel()
    return [outcome if isinstance(outcome, RoundResult) else None for outcome in outcomes]


def _applied(honest: Sequence[Peer], results: Sequence[RoundResult | None]) -> dict[bytes, set[bytes]]:
    """Round → hashes of the tensors that honest members hold after it."""
    applied: dict[bytes, set[bytes]] = {}
    for peer, result in zip(honest, results, strict=True):
        if result is not None and result.total_weight > 0:
            held = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in peer.core._tensors)
            applied.setdefault(result.group.group_id, set()).add(held)
    return applied


SMALL = [(4, 1, 0), (8, 2, 0)]
LARGE = [
    *((4, 1, seed) for seed in range(1, 400)),
    *((8, hostile, seed) for hostile in (2, 3) for seed in range(1, 150)),
    *((16, hostile, seed) for hostile in (5, 7) for seed in range(150)),
]


@pytest.mark.parametrize(("members", "hostile", "seed"), [*SMALL, *soak(LARGE)])
@simulated
async def test_honest_members_never_apply_unlike_results(members: int, hostile: int, seed: int) -> None:
    told = await play(seed, members, hostile)
    assert told.unlike == 0, told.lies
    if hostile <= (members - 1) // 3:
        assert told.committed[-1] >= members - hostile - 1, told.lies  # one may be catching up
