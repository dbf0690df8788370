"""What it costs the others when a peer does not stand by its word."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarmcli.network.identity import PeerID
from swarmcli.optim.peers.board import Board
from swarmcli.optim.peers.report import PeerReport
from swarmcli.optim.peers.survey import PositionReply, PositionRequest
from swarmcli.optim.state.lineage import LineagePosition
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, digests, together


async def run_with(claim: str) -> float:
    """Returns the seconds of two epochs of two trainers beside a peer that reports a lineage far ahead. Asked for its
    position, the peer says nothing ("silence"), gives an error, or claims less, the same, or too much."""
    async with Swarm() as swarm:
        liar = await swarm.node()
        trainers = [await swarm.trainer() for _ in range(2)]
        await together(*(trainer.train(2) for trainer in trainers))
        began, core = asyncio.get_running_loop().time(), trainers[0].core
        far = LineagePosition(10**6, 10**9, b"x" * 32)

        async def answer(peer: PeerID, request: PositionRequest) -> Any:
            if claim == "silence":
                await asyncio.sleep(100)
            says = {"less": core.position, "too much": LineagePosition(2**62, 2**62, b"x" * 32)}.get(claim, far)
            return PositionReply(says.epoch, says.samples, says.lineage, "training", core.report().terms)

        if claim != "error":
            liar.endpoint.serve("run.position", PositionRequest, answer)
        lie = {"epoch": far.epoch, "lineage": far.lineage.hex(), "addresses": list(liar.endpoint.addresses)}
        if claim != "no lie":
            await Board(liar, "run_peers", PeerReport, 3600.0).publish(core.report().model_copy(update=lie))
        await together(*(trainer.train(4) for trainer in trainers))
        assert len(digests(trainers)) == 1 and trainers[0].epoch == 4
        return asyncio.get_running_loop().time() - began


@pytest.fixture(scope="module")
def honest() -> float:
    return virtual_time.run(run_with("no lie"), seed=1)


@pytest.mark.parametrize(
    ("claim", "seconds"),
    [
        pytest.param("error", 1, id="who serves no such call"),
        pytest.param("less", 1, id="who answers with less", marks=pytest.mark.soak),
        pytest.param("too much", 1, id="who answers with what can be no position", marks=pytest.mark.soak),
        pytest.param("silence", 2 * 3, id="who is silent: one wait each"),
        pytest.param("the same", 2 * 10, id="who insists and has no state: ten seconds of knocking each"),
    ],
)
def test_reports_that_nobody_stands_by_cost_a_moment_once(honest: float, claim: str, seconds: float) -> None:
    assert virtual_time.run(run_with(claim), seed=1) <= honest + seconds
