"""For tests of states."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swarmcli.state import snapshot
from tests.averaging.states import CHUNK


@pytest.fixture(scope="module")
def small_chunks() -> Iterator[None]:
    """States of a few kilobytes travel in several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "_MIN_CHUNK", CHUNK)
        yield
