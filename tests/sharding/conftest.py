from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sharding.processes import Worlds


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """Makes worlds of real processes for the tests of a module; see tests/sharding/processes.py."""
    worlds = Worlds()
    yield worlds
    worlds.close()
