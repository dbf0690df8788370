"""What `make weigh` counts, on a house of two files; and that it finds a circle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.weigh import ROOT, circle, floors, main, read, twice, weigh

ONE = '''from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from house.two import Two

LIMIT, NAME = 3, "name"
MOST = 64 << 10  # bytes


class Both:
    def ask(self, what: str) -> str:
        """What it says."""
        return self._other.say(what)
'''
TWO = """from house import one


class Both:
    house = one.Both
"""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    folder = tmp_path / "house"
    folder.mkdir()
    for name, text in {"__init__": "", "one": ONE, "two": TWO}.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_what_is_read_is_counted(house: Path) -> None:
    found = {name.strip(): figure for name, figure in weigh(read(house)).items()}
    counted = ("files", "classes", "functions", "names of several", "that only forward", "module-level numbers")
    assert [found[name] for name in counted] == ["3", "2", "1", "1", "1", "1"]


def test_a_circle_of_imports_fails(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert circle(read(house)) == [], "what only the checker of types reads is no import"
    (house / "one.py").write_text(ONE.replace("from __future__ import annotations", "from .two import Two"))
    assert set(circle(read(house))) == {"house.one", "house.two"}
    assert "a circle of imports" in (main([str(house), str(house)]) or "")
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["1", "1"]


def test_a_class_has_a_name_of_its_own(house: Path) -> None:
    assert twice(read(house)) == ["Both"] and "in two places: Both" in (main([str(house)]) or "")
    # Walking through all trees would take seconds: a class begins a line.
    files = [file for folder in ("swarmcli", "coordinator_web") for file in (ROOT / folder).rglob("*.py")]
    names = [name for file in files for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE)]
    assert sorted(names) == sorted(set(names))


def test_the_map_of_the_floors_is_that_of_the_contract() -> None:
    drawn = (ROOT / "docs" / "architecture.md").read_text().partition("<!-- floors -->\n```\n")[2].partition("```")[0]
    rooms = [[f"swarmcli.{room}" for room in re.findall("[a-z_]+", floor)] for floor in drawn.splitlines()]
    named = [[f"swarmcli.{room.removeprefix('swarmcli.')}" for room in floor] for floor in floors()]
    assert rooms == named, "python tests/weigh.py --floors draws it"
