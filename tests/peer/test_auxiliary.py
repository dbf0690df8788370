"""An auxiliary on a small machine: it knows the shapes of the model, and loads nothing that builds one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swarmcli.errors import RecipeError
from swarmcli.training import build_task
from swarmcli.training.outline import outline_in_process
from tests.training.small_tasks import small

PROGRAM = """
import sys
from pathlib import Path
from swarmcli.cli import main, session
from swarmcli.peer.lifetime import Collaboration
from swarmcli.peer.home import Home
from swarmcli.peer.peer import RunPeer
from tests.training.small_tasks import small

directory = Path(sys.argv[1])
recipe = small(directory, "local.host=127.0.0.1")
with Home.at(directory / "home") as home, RunPeer(recipe, "auxiliary", home) as peer:
    collaboration = Collaboration(peer, auxiliary=True)
    print([(list(p.shape), str(p.dtype), p.requires_grad) for p in collaboration.model.parameters()])
    collaboration.close()
print([name for name in ("transformers", "datasets", "fastapi") if name in sys.modules])
"""


def test_an_auxiliary_has_the_outline_of_the_model_and_does_not_import_what_builds_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    model = build_task(small(tmp_path)).build_model(outline=True)
    outline = [(list(p.shape), str(p.dtype), p.requires_grad) for p in model.parameters()]
    assert (done.stdout.splitlines(), done.returncode) == ([str(outline), "[]"], 0), done.stderr


@pytest.mark.parametrize("verb", [["--help"], ["log", "."], ["join", "--help"]])
def test_who_only_asks_loads_no_library_for_training(verb: list[str], tmp_path: Path) -> None:
    program = (
        "import sys; sys.argv[0] = 'swarm'\n"
        "from swarmcli.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "loaded = [name for name in ('torch', 'transformers') if name in sys.modules]\n"
        "sys.stderr.write(f'loaded: {loaded}')"
    )
    done = subprocess.run([sys.executable, "-c", program, *verb], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.endswith("loaded: []"), done.stderr


def test_what_is_wrong_with_the_model_is_told_as_ever(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"base_model: unknown model_type 'gpt22'; did you mean gpt2\?"):
        outline_in_process(small(tmp_path, "base_model.model_type=gpt22"))
