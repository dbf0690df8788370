"""Limits, pauses and hours that change at random moments hold nobody up for good: see `unlike.py`."""

from __future__ import annotations

import pytest

from tests.optim.unlike import Allowance, search
from tests.suites import soak


@pytest.mark.parametrize("drawn", [*range(2, 22), *soak([*range(22, 44), *range(45, 250)])])
def test_epochs_end_whatever_the_peers_lend(drawn: int) -> None:
    """Three times T and five seconds."""
    search(drawn, allowance=Allowance(), afterwards=Allowance())


@pytest.mark.parametrize("drawn", soak([1, 44]))
def test_epochs_take_longer_where_a_check_of_the_states_or_a_quick_peer_waits_for_another(drawn: int) -> None:
    """1: one that is back waits 15 s for a check of the states in which nobody is with it. 44: an epoch of 29 s, where
    it may take 20: nobody had told of a slow link that was lent while the round ran."""
    search(drawn, allowance=Allowance(seconds=15.0), afterwards=Allowance(seconds=15.0))
