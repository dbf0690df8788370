"""Limits, pauses and hours that change at random moments hold nobody up for good: see `unlike.py`."""

from __future__ import annotations

import pytest

from tests.optim.unlike import Allowance, search
from tests.suites import soak

BEYOND = [1, 44, 98, 203, 241]  # of 250, whose longest epoch takes up to ten seconds more than the aim


@pytest.mark.parametrize(
    ("drawn", "seconds"), [(7, 12.0), *soak((drawn, 60.0) for drawn in range(2, 250) if drawn not in BEYOND)]
)
def test_epochs_end_whatever_the_peers_lend(drawn: int, seconds: float) -> None:
    """The aim: three times T and five seconds. With 7 two train, and an auxiliary takes part."""
    search(drawn, allowance=Allowance(), afterwards=Allowance(), seconds=seconds)


@pytest.mark.parametrize("drawn", soak(BEYOND))
def test_epochs_take_a_little_longer_where_several_waits_follow_each_other(drawn: int) -> None:
    """Such waits are a check of states that nobody else has (15 s, drawn 1), or a line that turns slow in each of two
    tries (drawn 44)."""
    search(drawn, allowance=Allowance(seconds=15.0), afterwards=Allowance(seconds=15.0))
