"""Limits, pauses and hours that change at random moments hold nobody up for good: see `unlike.py`."""

from __future__ import annotations

import pytest

from tests.optim.unlike import Allowance, search
from tests.suites import soak

# Wider than the aim, three times T and five seconds: a slow link that nobody has told of is found out in rounds.
ALLOWED = Allowance(seconds=120.0)


@pytest.mark.parametrize("seed", [1, 2, 3, *soak(range(4, 100))])
def test_epochs_end_whatever_the_peers_lend(seed: int) -> None:
    search(seed, allowance=ALLOWED, afterwards=ALLOWED)
