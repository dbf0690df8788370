"""The example of a package that brings a task is installed as a user installs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINS = """\
import sys
from itertools import islice
import torch
from swarmcli.recipe import load_recipe
from swarmcli.training import build_task
task = build_task(load_recipe(sys.argv[1]))
model, losses = task.build_model(), []
optimizer = torch.optim.SGD(model.parameters(), 100.0)
for batch in islice(task.batches(1), 30):
    loss = task.loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.8 * losses[0], losses
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=known, timeout=300)


@pytest.mark.e2e
def test_a_task_of_an_installed_package_is_validated_and_trains(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "task_package", tmp_path / "package")  # pip builds beside the sources
    recipe = str(tmp_path / "package" / "recipe.yaml")
    swarm = ("-c", "from swarmcli.cli.main import main; main()")
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    done = run("-m", "pip", "install", *options, "--target", str(tmp_path / "site"), str(tmp_path / "package"))
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    valid = run(*swarm, "validate", recipe, PYTHONPATH=path)
    assert valid.returncode == 0, valid.stderr
    assert "bigrams (learns the task bigrams of the package swarm-bigrams) on stdlib" in valid.stdout
    trained = run("-c", TRAINS, recipe, PYTHONPATH=path)
    assert trained.returncode == 0, trained.stderr
