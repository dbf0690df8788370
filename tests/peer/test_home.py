from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from swarmcli.errors import SwarmError
from swarmcli.machine.registry import LocalPeer
from swarmcli.peer.home import Home, running_beside


def test_each_peer_takes_the_first_free_home(tmp_path: Path) -> None:
    with Home.claim(tmp_path, "trainer") as first, Home.claim(tmp_path, "trainer") as second:
        assert first.path == tmp_path / "trainer-1"
        assert second.path == tmp_path / "trainer-2"
    with Home.claim(tmp_path, "trainer") as again, Home.claim(tmp_path, "monitor") as monitor:
        assert (again.path.name, monitor.path.name) == ("trainer-1", "monitor-1"), "roles do not share homes"


def test_a_home_asked_for_by_name_must_be_free_and_one_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with Home.at(tmp_path / "mine"), pytest.raises(SwarmError, match="in use by another process"):
        Home.at(tmp_path / "mine")
    (tmp_path / "file").touch()
    with pytest.raises(SwarmError, match="file/trainer-1 cannot be used"):
        Home.claim(tmp_path / "file", "trainer")


def test_a_killed_process_holds_no_home(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from swarmcli.peer.home import Home;"
        "home = Home.claim(Path(sys.argv[1]), 'trainer'); print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        with Home.claim(tmp_path, "trainer") as beside:
            assert beside.path.name == "trainer-2"
        process.kill()
        process.wait()
    with Home.claim(tmp_path, "trainer") as after:
        assert after.path.name == "trainer-1"


def test_the_token_of_a_dashboard_outlives_a_restart_and_is_this_users_alone(tmp_path: Path) -> None:
    with Home.at(tmp_path / "monitor") as home:
        token = home.dashboard_token()
    with Home.at(tmp_path / "monitor") as again:
        assert again.dashboard_token() == token and len(token) >= 22
        (file,) = tmp_path.rglob("*.token")
        assert file.stat().st_mode & 0o777 == 0o600
        file.write_text("")
        assert again.dashboard_token() not in (token, "")


ME = 10  # when this peer was born


def neighbour(runs: Path, name: str, *, born: int = 1, run_id: str = "r", api: str = "http://") -> LocalPeer:
    return LocalPeer(1, 1.0, "trainer", run_id, str(runs / name), api=api, born=born)


def tell(runs: Path, name: str, *ports: int) -> None:
    (runs / name).mkdir()
    (runs / name / "peer.json").write_text(json.dumps({"addresses": [f"tcp://127.0.0.1:{port}" for port in ports]}))


def test_who_begins_without_contacts_joins_those_who_run_beside_it(tmp_path: Path) -> None:
    me = neighbour(tmp_path, "trainer-9", born=ME, api="")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so that nobody listens there
        port, nobody = listener.getsockname()[1], taken.getsockname()[1]
        for name in ("monitor-1", "other-run", "younger", "trainer-9"):
            tell(tmp_path, name, port)
        tell(tmp_path, "killed", nobody)
        tell(tmp_path, "half", nobody, port)
        tell(tmp_path.parent, f"{tmp_path.name}-elsewhere", port)

        def found(*living: LocalPeer) -> list[str]:
            return running_beside(me, lambda: living, seconds=0.0)

        assert found(neighbour(tmp_path, "monitor-1"), me) == [f"tcp://127.0.0.1:{port}"]
        assert found(neighbour(tmp_path, "half"), me) == [f"tcp://127.0.0.1:{port}"]
        assert found(me) == []  # not itself
        assert found(neighbour(tmp_path, "other-run", run_id="another"), me) == []
        assert found(neighbour(tmp_path, "younger", born=ME + 1), me) == []  # or both would wait for each other
        assert found(neighbour(tmp_path, "killed"), me) == []
        assert found(neighbour(tmp_path.parent, f"{tmp_path.name}-elsewhere"), me) == []


def test_it_waits_for_one_that_has_begun_and_is_not_ready_yet(tmp_path: Path) -> None:
    me, looks = neighbour(tmp_path, "trainer-2", born=ME), list[None]()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def living() -> list[LocalPeer]:
            looks.append(None)
            if len(looks) == 2:
                tell(tmp_path, "trainer-1", listener.getsockname()[1])
            return [neighbour(tmp_path, "trainer-1", api="")]

        assert len(running_beside(me, living)) == 1 and len(looks) == 2
