"""What `swarm demo` brings along, so that it needs no checkout."""

from __future__ import annotations

import tomllib
from pathlib import Path

from swarmcli.cli.demo import RECIPE

ROOT = Path(__file__).parents[2]


def test_the_recipe_is_the_one_of_the_readme() -> None:
    for_editors, _, text = (ROOT / "recipes" / "stdlib-lm.yaml").read_text().partition("\n")
    assert for_editors.startswith("# yaml-language-server") and RECIPE.read_text() == text


def test_a_wheel_has_every_file_that_lies_beside_the_code() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {file for name, patterns in data.items() for each in patterns for file in (ROOT / name).glob(each)}
    found = {
        file
        for name in ("swarmcli", "coordinator_web")
        for file in (ROOT / name).rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc")
    }
    assert found == shipped
