from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.peer.roles import run
from tests.sharding.conftest import worlds

__all__ = ["worlds"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with run(tmp_path, monkeypatch) as starter:
        yield starter
