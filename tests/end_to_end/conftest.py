from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarmcli.cli.processes import Children
from tests.end_to_end.forked import ForkedChildren
from tests.end_to_end.swarm import Swarm


@pytest.fixture
def children() -> Iterator[Children]:
    """Starts peers; at the end of the test none of them is left."""
    with ForkedChildren() as made:
        yield made


@pytest.fixture
def swarm(tmp_path: Path, children: Children) -> Callable[..., Swarm]:
    """Makes a swarm of processes that trains for so many epochs."""
    return lambda max_epochs, **options: Swarm(tmp_path, children, max_epochs=max_epochs, **options)
