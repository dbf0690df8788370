from __future__ import annotations

import math
from pathlib import Path

import pytest

from swarmcli.peer.lending import files_of, room_for
from swarmcli.recipe.limit_store import LimitStore
from tests.training.small_tasks import small

HUB = "datasets=[{source: huggingface, path: ada/texts}]"


def test_what_a_peer_may_still_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
    monkeypatch.setenv("SWARM_RUNTIME_DIR", str(tmp_path / "runtime"))
    for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    home, recipe = tmp_path / "home", small(tmp_path, HUB)
    limits = LimitStore(None, tmp_path / "config.yaml")
    assert room_for(limits, recipe, home) == math.inf
    limits.change({"disk": "10 MB"})
    cache = tmp_path / "hub-home" / "datasets" / "ada___texts"
    for place in (home / "checkpoints", cache):
        place.mkdir(parents=True)
        (place / "file").write_bytes(bytes(1 << 20))
    assert files_of(recipe, home)[:2] == [home, cache]
    assert room_for(limits, recipe, home) == pytest.approx(10e6 - (2 << 20), abs=50_000)


def test_what_is_downloaded_to_evaluate_on_counts_too(tmp_path: Path) -> None:
    recipe = small(tmp_path, HUB, "evaluation={every_epochs: 1, dataset: {source: huggingface, path: bob/others}}")
    assert sum("bob" in place.name for place in files_of(recipe, tmp_path)) == 2
