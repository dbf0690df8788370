from __future__ import annotations

import json
from pathlib import Path

import pytest

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


def test_agreeing_counts_for_one_role_and_one_recipe() -> None:
    run = LinkedRun(LINK)
    run.keep("auxiliary", text())
    assert run.has_agreed("auxiliary", text()) and not run.has_agreed("trainer", text())
    assert not run.has_agreed("auxiliary", text().replace('"data"', '"elsewhere"'))
    run.keep("trainer", text())
    assert run.has_agreed("auxiliary", text())


def test_a_recipe_that_was_changed_so_that_it_no_longer_agrees_is_fetched_again(data: Path) -> None:
    run = LinkedRun(LINK)
    run.keep("trainer", text())
    run.recipe.write_text(json.dumps(json.loads(text()) | {"seed": 9}))
    assert run.kept() is None
    run.recipe.write_text("no recipe: [")
    assert run.kept() is None


def test_torn_agreements_are_none_and_a_directory_that_cannot_be_made_is_named(data: Path) -> None:
    run = LinkedRun(LINK)
    run.keep("trainer", text())
    (run.path / "agreed.json").write_text("{")
    assert not run.has_agreed("trainer", text())
    data.rename(data.with_name("moved"))
    data.write_text("a file")
    with pytest.raises(SwarmError, match="SWARM_DATA_DIR"):
        run.keep("trainer", text())


def test_without_a_word_from_the_user_the_platform_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_DATA_DIR")
    assert data_directory().name == "swarm" and data_directory().is_absolute()
