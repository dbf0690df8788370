"""The scripts of benchmarks/ run rarely; what they import from here must not move away from under them."""

import importlib
from pathlib import Path

SCRIPTS = sorted(
    path.stem for path in (Path(__file__).parent.parent / "benchmarks").glob("*.py") if path.stem != "__main__"
)


def test_every_script_finds_what_it_imports() -> None:
    assert SCRIPTS
    for script in SCRIPTS:
        importlib.import_module(f"benchmarks.{script}")
