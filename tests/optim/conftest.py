from __future__ import annotations

from collections.abc import Iterator

import pytest

from swarmcli.dht import DHT
from tests.optim.shells import dhts


@pytest.fixture
def dht() -> Iterator[DHT]:
    """A peer over TCP that is alone."""
    with dhts(1) as (made,):
        yield made
