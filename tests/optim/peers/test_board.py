"""Reports come rarer as peers become more: what all of them cost stays bounded."""

from __future__ import annotations

import asyncio

import pydantic
import pytest

from swarmcli.optim.peers.board import BURST, READ_RATE, REPLICA_RATE, REPLICAS, Board, period_of
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import nodes


class Report(pydantic.BaseModel):
    text: str


@pytest.mark.parametrize("nbytes", [300, 1000])
@pytest.mark.parametrize("peers", [8, 64, 256, 1024])
def test_what_a_peer_reads_and_a_replica_sends_stays_within_its_rate(peers: int, nbytes: int) -> None:
    written = peers * nbytes / period_of(peers, nbytes)  # bytes per second
    assert written * REPLICAS <= READ_RATE * (1 + 1e-9)
    assert written * peers <= REPLICA_RATE * (1 + 1e-9)


def test_a_peer_that_has_much_to_tell_waits_for_its_turn_once_it_has_told_some() -> None:
    async def main() -> None:
        async with nodes(3) as peers:
            boards = [Board(node, "board", Report, 60.0) for node in peers]
            for board in boards:
                await board.publish(Report(text="x" * 3000))
            for board in boards:
                await board.refresh()
            board = boards[0]
            assert board.period == pytest.approx(period_of(3, 3160), rel=0.05)
            for _ in range(BURST):
                await board.publish(Report(text="x" * 3000))
            wait = board.turn_in()
            assert wait > board.period / 2
            await asyncio.sleep(wait)
            assert board.turn_in() == pytest.approx(0.0, abs=1e-6)

    virtual_time.run(main(), timeout=60)


def test_a_peer_behind_a_slow_line_writes_and_reads_with_a_twentieth_of_it() -> None:
    async def main() -> None:
        async with nodes(8) as peers:
            boards = [Board(node, "board", Report, 60.0) for node in peers]
            for board in boards:
                await board.publish(Report(text="x" * 850))
            board = boards[0]
            await board.refresh()
            assert board.pause == board.period
            board.line = 10e3
            each = 8 * 1000 * REPLICAS / (board.pause / 2)  # bytes per second that come, if all write in between
            assert each <= 1.05 * 10e3 / 20 and 1000 * REPLICAS / board.pause <= 10e3 / 20
            assert board.lives >= 3 * board.pause and board.period < 5  # of others it expects no less than before

    virtual_time.run(main(), timeout=60)
