"""Who looks at what: nobody knows before, everyone could tell after, and the table in the docs is the formula."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from swarmcli.averaging.audit.signed import chance_for, commitment, drawn


def chance_to_be_found(share: float, auditors: int, honest: int, false_parts: float) -> float:
    """The chance that in one round an honest auditor looks at one of `false_parts` false parts."""
    seldom = (1.0 - chance_for(share, auditors)) ** (honest * false_parts)
    return 1.0 - seldom


def rounds_until_found(found: float, certainty: float) -> int:
    """The rounds after which a liar is found with this certainty, if each finds it with the chance `found`."""
    if found >= 1.0:
        return 1
    return math.ceil(math.log(1.0 - certainty) / math.log(1.0 - found) - 1e-9)


def test_the_draw_follows_from_the_secret_and_the_signature_together() -> None:
    parts = range(1000)
    first = drawn(b"s" * 32, b"r" * 64, parts, 0.1)
    assert first == drawn(b"s" * 32, b"r" * 64, parts, 0.1)
    assert first != drawn(b"t" * 32, b"r" * 64, parts, 0.1)
    assert first != drawn(b"s" * 32, b"q" * 64, parts, 0.1)
    assert commitment(b"s" * 32) != commitment(b"t" * 32)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_so_many_parts_are_drawn_as_were_asked_for(share: float) -> None:
    chance = chance_for(share, 4)
    seen = sum(len(drawn(bytes([member]) * 32, b"r" * 64, range(5000), chance)) for member in range(4))
    assert seen == pytest.approx(share * 5000, rel=0.1, abs=1)


def test_the_table_in_the_docs_is_the_formula() -> None:
    text = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| (\d+) of (\d+) \| ([\d.]+) % \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert len(rows) >= 3
    for hostile, members, share, false_parts, half, most in rows:
        honest, auditors = int(members) - int(hostile), int(members) - 1
        found = chance_to_be_found(float(share) / 100, auditors, honest, int(false_parts))
        assert (rounds_until_found(found, 0.5), rounds_until_found(found, 0.95)) == (int(half), int(most))
