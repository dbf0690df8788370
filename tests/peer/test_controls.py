from __future__ import annotations

from pathlib import Path

import pytest

from swarmcli.peer.activity import Activity
from swarmcli.peer.controls import OF_CARD, PeerControls
from swarmcli.recipe.limit_store import LimitStore


def test_limits_of_a_graphics_card_that_is_not_there_are_shown_only_where_one_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_CONFIG", str(tmp_path / "config.yaml"))
    for has_card in (True, False):
        controls = PeerControls(Activity(), LimitStore(), bool, has_card=has_card)
        assert all((key in controls.limits()["limits"]) is has_card for key in OF_CARD)
        assert "upload" in controls.limits()["limits"]
    controls.change_limits({"gpu": "50%"}, keep=False)
    assert controls.limits()["limits"]["gpu"]["value"] == 0.5 and "gpu_memory" not in controls.limits()["limits"]
