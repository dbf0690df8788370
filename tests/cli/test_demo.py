"""A wheel brings along all that `swarm demo` and `swarm init` need, without a checkout."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_wheel_has_every_file_that_lies_beside_the_code() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {file for name, patterns in data.items() for each in patterns for file in (ROOT / name).glob(each)}
    found = {
        file
        for name in ("swarmcli", "coordinator_web")
        for file in (ROOT / name).rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc")
    }
    recipes = {ROOT / "swarmcli" / "shipped" / file.name for file in (ROOT / "recipes").glob("*.yaml")}
    assert found | recipes == shipped
