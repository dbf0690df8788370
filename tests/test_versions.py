"""What pyproject.toml allows, and what is tested of it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENT = re.compile(r"([\w.-]+)>=([\d.]+)")


def bounds() -> dict[str, str]:
    """The lower bound of each library that swarm or its tests use."""
    extras = PROJECT["optional-dependencies"]
    used = (*PROJECT["dependencies"], *extras["datasets"], *extras["hub"], *extras["test"])
    found = [REQUIREMENT.fullmatch(each) for each in used]
    assert all(found)
    return {each[1].lower(): each[2] for each in found if each}


def test_make_test_oldest_installs_the_lower_bounds_and_nothing_else() -> None:
    lines = [line for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.lower().split("==") for line in lines)
    assert set(pinned) == set(bounds())
    for name, bound in bounds().items():
        exact = [*pinned[name].split("."), "0", "0"]
        assert exact[:3] == [*bound.split("."), "0", "0"][:3], f"{name}: {pinned[name]} is not {bound}"
