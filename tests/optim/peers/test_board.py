"""Reports come rarer as peers become more: what all of them cost stays bounded."""

from __future__ import annotations

import asyncio

import pydantic
import pytest

from swarmcli.dht import DHTNode
from swarmcli.optim.peers import board as boards_module
from swarmcli.optim.peers.board import BURST, OF_A_LINE, READ_RATE, REPLICA_RATE, REPLICAS, Board, rate_of
from tests.optim.optim_swarm import Swarm, nodes, together
from tests.simulation import now, within

LINE = 10e3  # bytes per second


class Report(pydantic.BaseModel):
    text: str


@pytest.mark.parametrize("peers", [8, 64, 256, 1024])
def test_what_a_peer_reads_and_a_replica_sends_stays_within_its_rate(peers: int) -> None:
    assert rate_of(peers) <= READ_RATE
    assert peers * rate_of(peers) / REPLICAS <= REPLICA_RATE * (1 + 1e-9)


@within(60)
async def test_a_peer_that_has_much_to_tell_waits_for_its_turn_once_it_has_told_some() -> None:
    async with nodes(3) as peers:
        boards = [Board(node, "board", Report, 60.0) for node in peers]
        for board in boards:
            await board.publish(Report(text="x" * 3000))
        for board in boards:
            await board.refresh()
        board = boards[0]
        assert board.pause == pytest.approx(3 * 3280 / READ_RATE, rel=0.05)
        for _ in range(BURST):
            await board.publish(Report(text="x" * 3000))
        wait = board.turn_in()
        assert wait > board.pause / 2
        await asyncio.sleep(wait)
        assert board.turn_in() == pytest.approx(0.0, abs=1e-6)


async def written(peers: list[DHTNode], size: int) -> list[Board[Report]]:
    boards = [Board(node, "board", Report, 60.0) for node in peers]
    for board in boards:
        await board.publish(Report(text="x" * size))
    return boards


@within(600)
async def test_a_peer_reads_no_more_than_its_rate_allows_and_in_the_end_all() -> None:
    """The reader begins when others have written much; each refresh goes on where the last one stopped."""
    async with nodes(8, clients=1) as peers:
        await written(peers[:-1], 6000)
        reader, traffic = Board(peers[-1], "board", Report, 60.0), peers[-1].endpoint.statistics
        before = traffic().traffic.received
        found, looks = await reader.refresh(), 1
        assert 0 < len(found) < 7  # as much as sixteen usual reports
        while len(found) < 7:
            await asyncio.sleep(reader.look)
            found, looks = await reader.refresh(), looks + 1
        assert looks < 10
        began = now()
        for _ in range(50):
            await reader.refresh()
            await asyncio.sleep(0.1)
        passed = now() - began
        assert traffic().traffic.received - before < 7 * 7000 + 10e3 + READ_RATE * passed


@within(60)
async def test_a_peer_behind_a_slow_line_writes_and_reads_with_a_part_of_it() -> None:
    async with nodes(8) as peers:
        boards = await written(peers, 850)
        board = boards[0]
        await board.refresh()
        usual = board.pause
        board.line = LINE
        assert 8 * 1000 / board.pause <= OF_A_LINE * LINE  # bytes per second that come, if all write in between
        assert REPLICAS * 1000 / board.pause <= OF_A_LINE * LINE
        assert board.lives >= 3 * board.pause > 20 * usual


@within(600)
async def test_ends_of_epochs_wait_for_no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all have met, nobody reads or writes another report, as where very many peers do."""
    async with Swarm() as swarm:
        trainers = [await swarm.trainer() for _ in range(3)]
        await together(*(trainer.train(3) for trainer in trainers))
        loop = asyncio.get_running_loop()
        took: list[float] = []
        for rate in (READ_RATE, 1e-3):
            monkeypatch.setattr(boards_module, "READ_RATE", rate)
            began, epoch = loop.time(), trainers[0].epoch
            await together(*(trainer.train(epoch + 20) for trainer in trainers))
            took.append(loop.time() - began)
        assert took[1] < 1.1 * took[0] + 1.0, took
        assert len({trainer.core.position for trainer in trainers}) == 1
