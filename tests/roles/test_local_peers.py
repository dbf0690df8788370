from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarmcli.roles.processors import VARIABLE, LocalPeer, LocalPeers, runtime_directory

CODE = """
import sys
from pathlib import Path
from swarmcli.roles.processors import LocalPeer, LocalPeers
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
    dead = LocalPeer(os.getpid(), here().started - 3600, "trainer", "run", "/home")
    peers.enter(dead)
    peers.enter(here())
    assert peers.living() == [here()]
    assert len(list(peers.directory.iterdir())) == 1


def test_a_removed_file_is_written_again_and_a_foreign_one_is_left_alone(peers: LocalPeers) -> None:
    with peers.entered(here()):
        for file in peers.directory.iterdir():
            file.unlink()
        assert peers.living() == []
        (peers.directory / "1-2.json").write_text('{"of": "another version"}')
        peers.enter(here())
        assert peers.living() == [here()]
    assert [file.name for file in peers.directory.iterdir()] == ["1-2.json"]


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    assert runtime_directory() == tmp_path / "mine"
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert runtime_directory() == Path("/run/user/7/swarm")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runtime_directory().name == f"swarm-{os.getuid()}"


def test_it_is_this_users_alone(peers: LocalPeers, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with peers.entered(here()):
        assert stat.S_IMODE(peers.directory.stat().st_mode) == 0o700
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    link = LocalPeers(tmp_path / "link")
    with pytest.raises(PermissionError, match="is not this user's directory; set SWARM_RUNTIME_DIR"):
        link.enter(here())
    with link.entered(here()):  # a peer trains without being seen by its neighbours
        assert "other peers of this machine do not see this one" in caplog.text
        assert list((tmp_path / "elsewhere").iterdir()) == []
