"""Homes as peers leave them: a link, a journal."""

from __future__ import annotations

import os
import time
from pathlib import Path

from swarmcli.journal import JOURNAL_NAME, Journal, RunRecord
from swarmcli.network.identity import Identity
from swarmcli.recipe import Link, digest_of, parse_recipe
from tests.recipe.recipes import SMALL

PEER = Identity.from_seed(1).peer_id
DIGEST = digest_of(parse_recipe(SMALL))


def home(path: Path, place: str = "203.0.113.7:1", *, age: int = 0, run_id: str = "small") -> Link:
    """One whose peer has given out a link, which it returns; `age`: seconds since then."""
    path.mkdir(parents=True)
    found = Link(PEER, (place,), run_id, DIGEST)
    (path / "link").write_text(f"{found}\n")
    os.utime(path / "link", (1e9 - age, 1e9 - age))
    return found


def with_journal(path: Path, run_id: str = "small", role: str = "trainer") -> Path:
    """One whose peer has left a journal, which it returns."""
    Journal(path / JOURNAL_NAME, run=RunRecord(run_id, role, PEER.text, "Ada", "0.1.0"), clock=time.time).close()
    return path / JOURNAL_NAME
