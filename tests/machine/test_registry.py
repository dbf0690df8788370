from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from msgspec.structs import replace

from swarmcli.errors import ControlError
from swarmcli.machine import registry
from swarmcli.machine.registry import VARIABLE, LocalPeer, LocalPeers, birth_of, runtime_directory

CODE = """
import sys
from pathlib import Path
from swarmcli.machine.registry import LocalPeer, LocalPeers
with LocalPeers(Path(sys.argv[1])).entered(LocalPeer.here("trainer", "run", Path("/home-1"))):
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Enters itself; the end of its input is the end of its entry."""
    with subprocess.Popen(
        [sys.executable, "-c", CODE, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


@pytest.fixture
def peers(tmp_path: Path) -> LocalPeers:
    return LocalPeers(tmp_path / "registry")


def here(role: str = "monitor") -> LocalPeer:
    return LocalPeer.here(role, "run", Path("/home-2"))  # type: ignore[arg-type]


def test_a_peer_is_seen_as_long_as_it_is_entered(peers: LocalPeers) -> None:
    assert peers.living() == []
    with peers.entered(here()):
        assert peers.living() == [here()]
        assert (here().pid, here().role, here().run_id, here().home) == (os.getpid(), "monitor", "run", "/home-2")
    assert peers.living() == [] and list(peers.directory.iterdir()) == []


@pytest.mark.e2e
def test_one_that_is_killed_is_gone_and_one_that_leaves_leaves_nothing(peers: LocalPeers) -> None:
    with peers.entered(here()):
        with another_process(peers.directory) as process:
            assert [peer.pid for peer in peers.living()] == [os.getpid(), process.pid]  # the oldest first
            process.kill()  # without being waited for: as a zombie it is dead as well
            while [peer.pid for peer in peers.living()] != [os.getpid()]:
                pass
        with another_process(peers.directory) as process:
            assert len(peers.living()) == 2
            process.communicate(b"")
            assert peers.living() == [here()]
        assert len(list(peers.directory.iterdir())) == 1


def test_another_process_with_the_id_of_a_dead_one_is_not_taken_for_it(peers: LocalPeers) -> None:
    dead = replace(here("trainer"), born=here().born - 1, api="http://127.0.0.1:9")
    peers.write(dead, "its token")
    peers.write(here(), "")
    assert peers.living() == [here()]
    assert [file.name for file in peers.directory.iterdir()] == [f"{here().stem}.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the moment of a start is kept as it was")
def test_a_clock_that_is_set_makes_no_process_unknown(peers: LocalPeers, monkeypatch: pytest.MonkeyPatch) -> None:
    booted, started = psutil.boot_time(), psutil.Process().create_time()
    with peers.entered(here()) as entry:
        for days in (-30, 30):
            monkeypatch.setattr("psutil._pslinux.boot_time", lambda days=days: booted + days * 86400)
            assert abs(psutil.Process().create_time() - started) > 86400 and peers.living() == [entry.peer]


def test_what_could_not_be_written_or_was_removed_is_written_again_and_a_foreign_file_is_left_alone(
    peers: LocalPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*ignored: object) -> None:
        raise OSError("no space left")

    with peers.entered(here()) as entry:
        with monkeypatch.context() as broken, pytest.raises(OSError, match="no space"):
            broken.setattr(Path, "replace", fail)
            entry.announce(name="Ada", api="http://127.0.0.1:1", token="secret")
        assert peers.living() == [here()]
        entry.announce(name="Ada", api="http://127.0.0.1:8080", token="secret")
        for file in peers.directory.iterdir():
            file.unlink()
        assert peers.living() == []
        (peers.directory / "notes.json").write_text("{}")
        entry.renew()
        assert peers.living() == [entry.peer] and peers.token(entry.peer) == "secret"
    assert [file.name for file in peers.directory.iterdir()] == ["notes.json"]


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    assert runtime_directory() == tmp_path / "mine"
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert runtime_directory() == Path("/run/user/7/swarm")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(registry, "OF_USERS", tmp_path)
    assert runtime_directory().name == f"swarm-{os.getuid()}"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "gettempdir", Mock(side_effect=FileNotFoundError))  # as on a full disk
    assert runtime_directory() == tmp_path / f"swarm-{os.getuid()}"
    (tmp_path / str(os.getuid())).mkdir(mode=0o700)  # a user who is logged in, and a program that was not told so
    assert runtime_directory() == tmp_path / str(os.getuid()) / "swarm"


def test_it_is_this_users_alone(peers: LocalPeers, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with peers.entered(here()):
        assert stat.S_IMODE(peers.directory.stat().st_mode) == 0o700
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    link = LocalPeers(tmp_path / "link")
    with pytest.raises(PermissionError, match="is not this user's directory; set SWARM_RUNTIME_DIR"):
        link.write(here(), "")
    with link.entered(here()):  # a peer trains without being seen by its neighbours
        assert "other peers of this machine do not see this one" in caplog.text
        assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.fixture
def shown(peers: LocalPeers) -> Iterator[LocalPeer]:
    with peers.entered(here()) as entry:
        entry.announce(name="Ada", api="http://127.0.0.1:8080", token="secret")
        yield entry.peer


def test_only_its_user_can_read_the_token(peers: LocalPeers, shown: LocalPeer) -> None:
    assert [stat.S_IMODE(file.stat().st_mode) for file in peers.directory.iterdir()] == [0o600, 0o600]
    assert peers.token(shown) == "secret"
    token = peers.directory / f"{shown.stem}.token"
    token.chmod(0o640)
    with pytest.raises(ControlError, match=r"other users may write it or read it; stop that process"):
        peers.token(shown)
    token.unlink()
    token.symlink_to("/etc/hostname")
    with pytest.raises(ControlError, match="cannot be used as the token of Ada"):
        peers.token(shown)
    token.unlink()
    with pytest.raises(ControlError, match="Ada cannot be controlled: it left no token"):
        peers.token(shown)


def test_the_processes_of_a_site_are_one_peer(peers: LocalPeers, shown: LocalPeer) -> None:
    parent = os.getppid()
    peers.write(replace(shown, pid=parent, born=birth_of(parent), api=""), "")
    assert len(peers.living()) == 2 and peers.peers() == [shown]


def test_what_lies_there_and_is_no_entry_is_not_read(peers: LocalPeers, shown: LocalPeer) -> None:
    own = (peers.directory / f"{shown.stem}.json").read_bytes()
    parent = os.getppid()  # another living process, with which a foreign file could be named
    foreign = peers.directory / f"{parent}-{birth_of(parent)}.json"
    for content in (b"", b"\xff", b"[" * 60_000, own, own + b" " * registry.MAX_BYTES, b'{"pid": -1}'):
        foreign.write_bytes(content)
        assert peers.living() == [shown]
    foreign.unlink()
    foreign.symlink_to(f"{shown.stem}.json")
    assert peers.living() == [shown]
    foreign.unlink()
    os.mkfifo(foreign)  # whoever opened it would wait for a writer
    assert peers.living() == [shown]
    foreign.unlink()
    foreign.mkdir()
    (
        peers.directory / f"7-{here().born}.json"
    ).mkdir()  # of a process that is not there, and cannot be removed as a file
    assert peers.living() == [shown]
    link = peers.directory.with_name("link")
    link.symlink_to(peers.directory)
    assert LocalPeers(link).living() == []
    peers.directory.chmod(0o777)
    assert peers.living() == [], "a directory that others can write is not believed"


def test_nobody_is_asked_on_another_computer() -> None:
    for api in ("http://192.0.2.1:80", "http://127.0.0.1:80@evil.example", "http://localhost:1", "x", ""):
        assert LocalPeer(1, 1.0, "trainer", "run", "/home", api=api).port is None
    assert LocalPeer(1, 1.0, "trainer", "run", "/home", api="http://127.0.0.1:80").port == 80
