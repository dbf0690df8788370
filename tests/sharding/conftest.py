from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sharding.processes import Worlds

SHARED = Worlds()


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Makes worlds of real processes; see tests/sharding/processes.py. Directories that import it share them."""
    yield SHARED
    SHARED.close()
