"""Where limits come from, the file in which they are kept, and what former versions have left."""

from __future__ import annotations

import json
from errno import ENOSPC
from pathlib import Path
from unittest.mock import Mock

import pytest

from swarmcli.errors import RecipeError
from swarmcli.recipe import limit_store
from swarmcli.recipe.limit_store import COMMANDED, KEYS, RUNNING, LimitStore, keep_limits

from .recipes import refused, small

RECIPE = """\
run_id: small
base_model: {model_type: gpt2}
datasets: [{source: stdlib}]
sequence_len: 16
target_batch_size: 32
local:
  limits: {upload: 1 MB/s, download: 7 MB/s}
"""
# By the build before limits had a file of their own: written by hand, then `swarm limits set`.
FORMER_FILE = """\
# mine
name: Ada  # as on the dashboard
limits:
    on_battery: no
    time_zone: Europe/Berlin
    threads: 2
    processor: 50%
    upload: 2 MB/s
    # at night
    hours: 22:00-08:00
team: Night Owls
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


@pytest.fixture
def kept(config: Path) -> Path:
    return config.with_name("config.limits.json")


def test_the_strongest_place_that_says_something_counts(config: Path, kept: Path) -> None:
    keep_limits({"upload": 2e6, "processor": 0.3}, config)
    recipe = small("local.limits.processor=40%", text=RECIPE)
    store = LimitStore(recipe, config)
    assert (store.limits.upload, store.limits.processor, store.limits.download) == (2e6, 0.4, 7e6)
    assert store.sources["upload"] == str(kept) and store.sources["processor"] == COMMANDED
    assert store.sources["download"].endswith(":7") and "hours" not in store.sources
    store.change({"processor": "10%", "download": None})
    assert (store.limits.processor, store.limits.download) == (0.1, None)
    assert store.sources["processor"] == RUNNING
    assert store.shown()["download"] == {"value": None, "text": "none", "from": RUNNING}
    store.change({"processor": "default"})
    assert store.limits.processor == 0.4 and json.loads(kept.read_text())["processor"] == "30%"


@pytest.mark.parametrize("word", ["none", None])
def test_every_limit_can_be_lifted_by_a_word(config: Path, word: str | None) -> None:
    assert set(LimitStore(config=config).change(dict.fromkeys(KEYS, word)).model_dump().values()) == {None}


def test_on_a_full_disk_limits_are_set_for_now_or_not_at_all(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LimitStore(config=config)
    monkeypatch.setattr(limit_store, "write_file", Mock(side_effect=OSError(ENOSPC, "No space left on device")))
    with pytest.raises(RecipeError, match=r"No space left on device\), so nothing has changed; .* for now only"):
        store.change({"processor": 0.2}, keep=True)
    assert store.limits.processor is None and store.change({"processor": 0.2}).processor == 0.2


def test_what_is_kept_reaches_the_other_peers_but_where_their_command_line_says_something_else(config: Path) -> None:
    store, other = LimitStore(config=config), LimitStore(small("local.limits.processor=40%"), config)
    assert not other.reload()
    store.change({"upload": "1 MB/s", "processor": "20%"}, keep=True)
    assert other.reload() and (other.limits.upload, other.limits.processor) == (1e6, 0.4) and not other.reload()
    other.change({"processor": "10%"}, keep=True)
    assert store.reload() and (store.limits.processor, other.limits.processor) == (0.1, 0.1)
    store.change({"upload": "default"}, keep=True)
    assert other.reload() and other.limits.upload is None


@pytest.mark.parametrize("torn", ["", '{"upl', "\0\0\0", "[]", '{"upload": 3}', '{"upload": "fast, please"}'])
def test_a_file_that_is_damaged_or_gone_lifts_no_limit_and_says_what_helps(config: Path, kept: Path, torn: str) -> None:
    store = LimitStore(None, config)
    store.change({"upload": "2 MB/s"}, keep=True)
    kept.write_text(torn)
    for begin in (store.reload, lambda: LimitStore(None, config)):
        with pytest.raises(RecipeError, match=r"config\.limits\.json: .*(swarm limits reset|2 MB/s)"):
            begin()
    assert store.limits.upload == 2e6 and not store.reload()
    kept.unlink()
    with pytest.raises(RecipeError, match="swarm limits reset"):
        store.reload()
    assert store.limits.upload == 2e6 and not store.reload()
    LimitStore.change(store, dict.fromkeys(KEYS, "default"), keep=True)
    assert LimitStore(None, config).limits.written == {}


def test_limits_of_a_former_version_are_moved_once_and_those_that_are_gone_are_told_at_each_start(
    config: Path, kept: Path
) -> None:
    config.write_text(FORMER_FILE)
    for _ in range(2):
        store = LimitStore(None, config)
        written = {"on_battery": False, "processor": 0.5, "upload": 2e6, "hours": "22:00-08:00"}
        assert store.limits.written == written
        assert json.loads(kept.read_text()).keys() == {*written, "threads", "time_zone"}
        assert sorted(store.notes) == [
            f"{kept}: there is no limit threads in this version; `--set local.threads=4` is that of one peer, and "
            "`swarm limits set processor=50%` of all; `swarm limits reset threads` ends this line",
            f"{kept}: there is no limit time_zone in this version; hours are those of this computer's clock; `swarm "
            "limits reset time_zone` ends this line",
            f"{config}:3: limits count here no longer: those that stood here are in {kept}, where `swarm limits set` "
            "changes them; remove this section",
        ]
        assert config.read_text() == FORMER_FILE, "what a person wrote is nobody else's to change"
    config.write_text("name: Ada\nlimits: {upload: 9 MB/s}\n")
    store = LimitStore(None, config)
    store.change({"threads": "default", "time_zone": "default"}, keep=True)
    assert store.limits.upload == 2e6 and len(LimitStore(None, config).notes) == 1
    config.write_text("name: Ada\n")
    assert LimitStore(None, config).notes == ()


def test_a_mistake_in_limits_of_a_former_version_is_told_with_its_line_before_they_move(
    config: Path, kept: Path
) -> None:
    for text, said in (
        ("limits:\n  uplod: 3\n", "config.yaml:2: unknown key limits.uplod; did you mean upload?"),
        ("limits: 50%\n", "config.yaml:1: limits should be a section"),
        ("limits: [upload=2MB/s]\n", "config.yaml:1: limits should be a section"),
        ("limits:\n  upload: 3 apples\n", "config.yaml:2: limits.upload: '3 apples' is no rate; write for example 2"),
    ):
        config.write_text(text)
        with pytest.raises(RecipeError, match=f"^{config.parent}/{said}".replace("?", r"\?")):
            LimitStore(None, config)
        assert not kept.exists()


def test_a_limit_that_is_gone_is_refused_where_somebody_writes_it(config: Path) -> None:
    with pytest.raises(RecipeError, match="the new limits: there is no limit busy_above any more; with only_when_idle"):
        LimitStore(None, config).change({"busy_above": "10%"})
    said = refused(RECIPE, "local.limits.threads=2")
    assert said.startswith("--set local.limits.threads=2: unknown key local.limits.threads; there is no such limit any")
    assert "`--set local.threads=4`" in said
