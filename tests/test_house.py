"""The house's rules: no imports in a circle, a name for one class, versions that are tested, scripts that start."""

from __future__ import annotations

import importlib
import re
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.planted import PATCHES, Planted
from tests.weigh import ROOT, floors, main, read, twice, weigh

ONE = '''from __future__ import annotations

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


def in_a_circle(graph: grimp.ImportGraph) -> list[str]:
    """Modules of which each is imported by the next one, those that name a package's content too.

    Imports inside functions count, for they hide a circle; those for types only do not: two objects may know each
    other.
    """
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("swarmcli", "coordinator_web", exclude_type_checking_imports=True, cache_dir=None)
    assert in_a_circle(graph) == []


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


def test_every_script_of_the_benchmarks_finds_what_it_imports() -> None:
    """They run rarely; what they import must not move away from under them."""
    scripts = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__main__")
    assert scripts
    for script in scripts:
        importlib.import_module(f"benchmarks.{script}")


def test_every_planted_fault_applies_and_names_tests_that_are_there() -> None:
    """`make soak` plants them, which is rare: a comment that changes beside one must not break it unseen."""
    planted = [Planted.read(path) for path in sorted(PATCHES.glob("*.patch"))]
    assert planted
    broken = {each.name: said for each in planted if (said := each.apply(ROOT, "--check"))}
    lost = {each.name: test for each in planted for test in each.tests if not (ROOT / test).exists()}
    assert not broken and not lost
