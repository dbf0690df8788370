from __future__ import annotations

from dataclasses import replace

import pytest

from swarmcli.journal import RoundRecord

ROUND = RoundRecord(
    time=1.0,
    round_id="abc",
    purpose="run",
    epoch=3,
    outcome="committed",
    reason="",
    leader="",
    members=(),
    contributors=(),
    left_out={},
    bytes_sent=0,
    bytes_received=0,
    seconds=2.5,
    stages={"looking for group": 2.0, "running all-reduce": 0.5},
)


def test_a_round_takes_as_long_as_it_ran_and_not_as_its_group_stood() -> None:
    assert ROUND.took == pytest.approx(0.5)


def test_a_search_in_vain_takes_as_long_as_it_was() -> None:
    assert replace(ROUND, round_id="", seconds=2.0, stages={"looking for group": 2.0}).took == pytest.approx(2.0)
