"""The Python in README and docs runs as it stands there; what names an address of the documentation range compiles.

What reads a checkpoint below `runs/` finds the one of a run that has just begun.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from swarmcli.recipe import load_recipe
from swarmcli.training import CheckpointStore, build_task
from swarmcli.training.model_card import describe_model

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code: str, tmp_path: Path) -> None:
    compile(code, "example", "exec")
    if "203.0.113." in code:
        return
    checkpoints = re.search(r'"runs/([^"/]+)/([^"/]+)/checkpoints/latest"', code)
    if checkpoints is not None:
        begin_a_run(tmp_path, *checkpoints.groups())
    place = ROOT if checkpoints is None else tmp_path
    ran = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    if checkpoints is not None:
        assert ran.stdout.startswith("def ") and "Traceback" not in ran.stderr


def begin_a_run(directory: Path, name: str, home: str) -> None:
    """A checkpoint as a peer of the shipped recipe writes it, with a model that has learned nothing yet."""
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    task = build_task(recipe)
    store = CheckpointStore(
        directory / "runs" / recipe.run_id / home / "checkpoints",
        recipe.run_id,
        describe=lambda place, epoch, samples: describe_model(place, recipe, task, epoch, samples, trainers=1),
    )
    assert store.write(task.build_model(), {}, 0) is not None
