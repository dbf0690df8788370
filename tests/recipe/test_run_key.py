"""The run key's file, and what it signs."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmcli.errors import IdentityError
from swarmcli.recipe.run_key import RunKey, is_owners_position


def test_a_key_is_made_once_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    made = RunKey.create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert RunKey.load(path).public == made.public
    with pytest.raises(IdentityError, match="is there already"):
        RunKey.create(path)
    assert RunKey.load(path).public == made.public
    assert "PRIVATE" not in repr(made) and str(path) not in repr(made)


def test_a_key_that_is_missing_open_to_others_or_damaged_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    with pytest.raises(IdentityError, match=rf"no run key at {path}.*--run-key"):
        RunKey.load(path)
    RunKey.create(path)
    path.chmod(0o644)
    with pytest.raises(IdentityError, match=rf"run key {path} may be read.*chmod 600 {path}"):
        RunKey.load(path)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(IdentityError, match=rf"run key {path} holds no Ed25519 private key.*restore your copy"):
        RunKey.load(path)


def test_a_position_is_signed_for_one_recipe_lineage_and_state(tmp_path: Path) -> None:
    key = RunKey.create(tmp_path / "run.key")
    signature = key.sign_position("a" * 32, 7, 512, b"l" * 32, b"s" * 32)
    assert is_owners_position(key.public, signature, "a" * 32, 7, 512, b"l" * 32, b"s" * 32)
    for other in (
        ("b" * 32, 7, 512, b"l" * 32, b"s" * 32),
        ("a" * 32, 8, 512, b"l" * 32, b"s" * 32),
        ("a" * 32, 7, 513, b"l" * 32, b"s" * 32),
        ("a" * 32, 7, 512, b"m" * 32, b"s" * 32),
        ("a" * 32, 7, 512, b"l" * 32, b"t" * 32),
    ):
        assert not is_owners_position(key.public, signature, *other)
