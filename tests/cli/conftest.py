from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A computer of its own: no test meets peers, runs or settings of whoever runs it or of other tests, and what a
    command writes without being told where lies here."""
    for name, place in (("DATA_DIR", "data"), ("RUNTIME_DIR", "runtime"), ("CONFIG", "config.yaml")):
        monkeypatch.setenv(f"SWARM_{name}", str(tmp_path / place))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path
