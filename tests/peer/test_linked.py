from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swarmcli.cli.linking import with_settings
from swarmcli.errors import SwarmError
from swarmcli.network.identity import Identity
from swarmcli.peer.linked import LinkedRun, data_directory
from swarmcli.recipe import Link, digest_of, load_recipe, offered, read_offered
from tests.recipe.recipes import small

DIGEST = digest_of(small())
LINK = Link(Identity.generate().peer_id, ("203.0.113.7:31330",), "small", DIGEST)


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def text() -> str:
    run = LinkedRun(LINK)
    return run.text_of(read_offered(offered(small()).encode(), LINK, run.path))


def test_a_run_that_was_agreed_to_lies_in_the_data_directory_as_a_recipe_like_any_other(data: Path) -> None:
    run = LinkedRun(LINK)
    assert run.kept() is None
    run.keep("trainer", text())
    assert run.path == data / f"small-{DIGEST[:8]}"
    recipe = load_recipe(run.recipe)
    assert digest_of(recipe) == DIGEST and run.kept() == text()
    assert recipe.output_dir == run.path and recipe.local.data_dir == run.path / "data"
    assert recipe.network.initial_peers == LINK.addresses
    assert run.path.stat().st_mode & 0o077 == 0
    run.recipe.write_text(json.dumps(json.loads(text()) | {"seed": 9}))
    assert run.kept() is None, "it no longer agrees, and is fetched again"
    run.recipe.write_text("no recipe: [")
    assert run.kept() is None


@pytest.mark.parametrize("character", ["\x7f", "\x85", "\x9f", "\u2028", "\ufeff", "\U0001f600", "\\", "ä"])
def test_whatever_a_label_holds_the_recipe_is_read_again_as_it_came(data: Path, character: str) -> None:
    values = json.loads(offered(small())) | {"task": "sequence_classification", "labels": [f"a{character}b", "c"]}
    recipe = small(text=json.dumps(values).replace("\\ud83d\\ude00", character))  # YAML has no pairs
    link = replace(LINK, fingerprint=digest_of(recipe))
    run = LinkedRun(link)
    kept = run.text_of(read_offered(offered(recipe).encode(), link, run.path))
    run.keep("trainer", kept)
    assert run.kept() == kept and load_recipe(run.recipe).labels == recipe.labels
    assert digest_of(with_settings(run, kept, [])) == link.fingerprint


def test_agreeing_counts_for_one_role_and_one_recipe_and_a_torn_one_for_none(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LinkedRun(LINK)
    run.keep("auxiliary", text())
    assert run.has_agreed("auxiliary", text()) and not run.has_agreed("trainer", text())
    assert not run.has_agreed("auxiliary", text().replace('"data"', '"elsewhere"'))
    run.keep("trainer", text())
    assert run.has_agreed("auxiliary", text())
    (run.path / "agreed.json").write_text("{")
    assert not run.has_agreed("trainer", text())
    data.rename(data.with_name("moved"))
    data.write_text("a file")
    with pytest.raises(SwarmError, match="SWARM_DATA_DIR"):
        run.keep("trainer", text())
    monkeypatch.delenv("SWARM_DATA_DIR")  # then the platform says where
    assert data_directory().name == "swarm" and data_directory().is_absolute()
