"""A power cut leaves files of no bytes, or of zeros, where they were written in place or not flushed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarmcli.checkpoints.directory import CheckpointDirectory, Keep, loss_of, rules_of
from swarmcli.cli.service import _write
from swarmcli.errors import AddressError, IdentityError, MembershipError, RecipeError, SwarmError
from swarmcli.network.identity import Identity
from swarmcli.network.key_file import create_key_file
from swarmcli.owner.invitations import read_remembered, write_private
from swarmcli.peer.home import Home, addresses_in, read_link, remembered
from swarmcli.peer.linked import LinkedRun
from swarmcli.peer.peer import Summary
from swarmcli.recipe import Link, digest_of, load_recipe
from swarmcli.recipe.config import load_config
from swarmcli.recipe.limit_store import LimitStore, keep_limits
from tests.recipe.recipes import small

LINK = Link(Identity.from_seed(1).peer_id, ("203.0.113.7:31330",), "small", digest_of(small()))


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_DATA_DIR", str(tmp_path / "data"))


def token(home: Path) -> object:
    with Home.at(home) as claimed:
        return claimed.dashboard_token()


WRITERS: dict[str, Callable[[Path], object]] = {
    "dashboard.token": token,
    "summary.json": lambda home: Summary("run", "trainer").write(home / "summary.json"),
    "limits": lambda home: keep_limits({"upload": 2e6}, home / "config.yaml"),
    "members": lambda home: write_private(home / "members", "{}"),
    "unit": lambda home: _write(home / "unit", "[Unit]"),
    "evaluation.json": lambda home: CheckpointDirectory(home, Keep(), print).remember_loss(home, 2.5, 64),
    "keep.json": lambda home: CheckpointDirectory(home, Keep(7), print).mend(),
    "recipe.json": lambda home: LinkedRun(LINK).keep("trainer", "{}"),
    "identity.key": lambda home: create_key_file(home / "identity.key"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_gets_its_name_when_the_disk_has_all_of_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, named = set[int](), list[int]()
    fsync, replace, link = os.fsync, Path.replace, os.link

    def noting(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def naming(give: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def named_now(source: Any, target: Any) -> Any:
            named.append(Path(source).stat().st_ino)
            assert named[-1] in flushed, "the name could stand for a file that the disk does not have"
            return give(source, target)

        return named_now

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(Path, "replace", naming(replace))
    monkeypatch.setattr(os, "link", naming(link))
    WRITERS[name](tmp_path)
    assert named and set(named) <= flushed
    written = next(file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_ino == named[0])
    assert written.read_bytes() and written.parent.stat().st_ino in flushed


@pytest.mark.parametrize("torn", [b"", bytes(60)])
def test_what_matters_is_refused_by_name_and_what_does_not_is_made_anew(torn: bytes, tmp_path: Path) -> None:
    for name in ("identity.key", "members", "config.yaml", "config.limits.json", "recipe.yaml", "peer.json",
                 "contacts.json", "link", "dashboard.token", "evaluation.json", "keep.json"):  # fmt: skip
        (tmp_path / name).write_bytes(torn)
        (tmp_path / name).chmod(0o600)
    refused: list[tuple[str, type[SwarmError], Callable[[Path], object], str]] = [
        ("identity.key", IdentityError, Identity.load_or_create, "move it away and a new one is made"),
        ("members", MembershipError, read_remembered, "restore it from a backup"),
        ("config.yaml", RecipeError, load_config, "restore it, or remove it"),
        ("config.limits.json", RecipeError, lambda file: LimitStore(small(), tmp_path / "config.yaml"), "limits reset"),
        ("recipe.yaml", RecipeError, load_recipe, "is empty; restore it"),
    ]
    for name, kind, read, helps in refused:
        with pytest.raises(kind) as error:
            read(tmp_path / name)
        assert str(tmp_path / name) in str(error.value) and helps in str(error.value)
    with pytest.raises(AddressError):
        read_link(tmp_path)
    assert addresses_in(tmp_path / "peer.json", "addresses") == remembered(tmp_path) == []
    assert loss_of(tmp_path) is None and rules_of(tmp_path) == Keep()
    assert str(token(tmp_path)).isprintable() and token(tmp_path) == token(tmp_path)
    run = LinkedRun(LINK)
    run.keep("trainer", "{}")
    for file in run.path.glob("*.json"):
        file.write_bytes(torn)
    assert run.kept() is None and not run.has_agreed("trainer", "{}"), "it is fetched, and asked for, again"
