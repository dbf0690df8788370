"""`swarm sign`: the owner of a run says that a checkpoint is the run's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmcli.checkpoints.layout import MANIFEST, MODEL, OWNER, TRAINING
from swarmcli.cli.main import app
from swarmcli.errors import SwarmError
from swarmcli.network.identity import PeerID
from swarmcli.optim.state.lineage import LineagePosition
from swarmcli.peer.collaboration import owners_word
from swarmcli.recipe import load_recipe
from swarmcli.recipe.run_key import RunKey
from swarmcli.recipe.templates import compose

LINEAGE, PARAMETERS = b"l" * 32, b"p" * 32


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    key = RunKey.create(tmp_path / "mine.run-key")
    file = tmp_path / "recipe.yaml"
    file.write_text(compose(str(file), "mine", public=key.public.text, key="mine.run-key"))
    return file


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    place = tmp_path / "epoch-9"
    place.mkdir()
    swarm = {"epoch": 9, "samples_seen": 90, "lineage": LINEAGE.hex(), "parameters": PARAMETERS.hex()}
    content = {"format": 1, "run_id": "mine", "epoch": 9, "optimizer": {"swarm": swarm}}
    (place / MANIFEST).write_text(json.dumps({**content, "sha256": {MODEL: "", TRAINING: ""}}))
    return place


def test_peers_know_the_owners_signature_for_this_position_and_no_other(recipe: Path, checkpoint: Path) -> None:
    result = CliRunner().invoke(app, ["sign", str(recipe), str(checkpoint)])
    assert result.exit_code == 0, result.output
    signature = bytes.fromhex(json.loads((checkpoint / OWNER).read_text())["signature"])
    loaded = load_recipe(str(recipe), [])
    signed_by_owner = owners_word(loaded, str(loaded.run_key))
    assert signed_by_owner(LineagePosition(9, 90, LINEAGE), PARAMETERS, signature)
    assert not signed_by_owner(LineagePosition(10, 90, LINEAGE), PARAMETERS, signature)
    assert not signed_by_owner(LineagePosition(9, 90, LINEAGE), LINEAGE, signature)
    stranger = RunKey.create(recipe.with_name("other.run-key")).public
    assert not owners_word(loaded, PeerID(stranger).text)(LineagePosition(9, 90, LINEAGE), PARAMETERS, signature)


def test_another_key_signs_nothing_and_a_checkpoint_of_another_run_is_not_signed(
    recipe: Path, checkpoint: Path
) -> None:
    other = recipe.with_name("other.run-key")
    RunKey.create(other)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    for words, run_id in ((["--run-key", str(other)], "mine"), ([], "another")):
        (checkpoint / MANIFEST).write_text(json.dumps({**manifest, "run_id": run_id}))
        result = CliRunner().invoke(app, ["sign", str(recipe), str(checkpoint), *words])
        assert isinstance(result.exception, SwarmError | SystemExit) and not (checkpoint / OWNER).exists()
