"""The Python in README and docs runs as it stands there; what names an address of the documentation range compiles.

Each example has a process of its own, forked from one that has imported torch and swarmcli already. What reads a
`latest` checkpoint finds the one of a run that has just begun.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import pictures
from swarmcli.recipe import load_recipe
from swarmcli.training import CheckpointStore, build_task
from swarmcli.training.model_card import describe_model
from tests.forkserver import CONTEXT

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("name", ["epoch", "round"])
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    draw = {"epoch": pictures.epoch, "round": pictures.round_}[name]
    assert (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8") == draw()


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code: str, tmp_path: Path) -> None:
    compile(code, "example", "exec")
    if "203.0.113." in code:
        return
    checkpoints = re.search(r'"([^"]*)/checkpoints/latest"', code)
    if checkpoints is not None:
        leave_a_checkpoint(tmp_path / checkpoints[1])
    place = ROOT if checkpoints is None else tmp_path
    process = CONTEXT.Process(target=run, args=(code, str(place), str(tmp_path)), daemon=True)
    process.start()
    process.join()
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0 and "Traceback" not in said, said
    if checkpoints is not None:
        assert re.search("^def ", said, re.MULTILINE), said


def run(code: str, place: str, own: str) -> None:
    """As `python -c` does, with what it says in a file. It finds no peers that other tests have here."""
    os.environ["SWARM_RUNTIME_DIR"] = f"{own}/peers"
    output = os.open(f"{own}/said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(place)
    sys.argv = ["-c"]
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()


def leave_a_checkpoint(home: Path) -> None:
    """A checkpoint as a peer of the shipped recipe writes it, with a model that has learned nothing yet."""
    recipe = load_recipe(ROOT / "recipes" / "stdlib-lm.yaml")
    task = build_task(recipe)
    store = CheckpointStore(
        home / "checkpoints",
        recipe.run_id,
        describe=lambda place, epoch, samples: describe_model(place, recipe, task, epoch, samples, trainers=1),
    )
    assert store.write(task.build_model(), {}, 0) is not None


@pytest.mark.e2e
def test_the_site_builds_and_all_its_links_lead_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    commands = (tmp_path / "site" / "commands.html").read_text()
    assert "swarm join" in commands and "--no-port-mapping" in commands
