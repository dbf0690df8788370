from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from swarmcli.errors import ControlError
from swarmcli.machine import client
from swarmcli.machine.registry import LocalPeer, LocalPeers


@contextmanager
def answering(answer: bytes, asked: list[bytes] | None = None) -> Iterator[int]:
    """One connection to a port of its own is answered with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                (asked if asked is not None else []).append(connection.recv(1 << 16))
                with suppress(OSError):  # it has heard enough
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def reply(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


@pytest.fixture
def registry(tmp_path: Path) -> LocalPeers:
    return LocalPeers(tmp_path / "registry")


@pytest.fixture
def peer_at(registry: LocalPeers) -> Iterator[Callable[[int], LocalPeer]]:
    with registry.entered(LocalPeer.here("trainer", "a-run", Path("/home"))) as entry:

        def announced(port: int) -> LocalPeer:
            entry.announce(name="Ada", api=f"http://127.0.0.1:{port}", token="secret")
            return entry.peer

        yield announced


def test_it_brings_the_token_and_gives_what_is_answered(
    registry: LocalPeers, peer_at: Callable[[int], LocalPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:1")  # of no concern here
    asked: list[bytes] = []
    with answering(reply(b'{"a": 1}'), asked) as port:
        assert client.post(peer_at(port), "pause", {"seconds": 1}, registry=registry) == {"a": 1}
    head, _, body = asked[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /api/v1/pause HTTP/1.1") and b"Authorization: Bearer secret" in head
    assert b"Host: 127.0.0.1:" in head and body in (b'{"seconds": 1}', b"")  # perhaps in a packet of its own


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (reply(b'{"detail": "it is stopping already"}', "422 X"), "Ada refuses: it is stopping already"),
        (reply(b"no\x1b[2J such name", "403 X"), r"Ada refuses: no\[2J such name"),
        (reply(b"", "500 X"), "Ada refuses: status 500"),
        (reply(b"<html>"), "cannot be read"),
        (reply(b"[" * 60_000), "cannot be read"),
        (reply(b"[" * 60_000, "403 X"), r"Ada refuses: \[\["),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (1 << 17), "more than 65536 bytes"),
        (b"SSH-2.0-nothing\r\n", "does not answer"),
        (b"", "does not answer"),
    ],
)
def test_whatever_answers_ends_in_a_sentence(
    answer: bytes, said: str, registry: LocalPeers, peer_at: Callable[[int], LocalPeer]
) -> None:
    with answering(answer) as port, pytest.raises(ControlError, match=said):
        client.ask(peer_at(port), "GET", "state", registry=registry, most=1 << 16)


def test_one_that_is_just_starting_or_has_ended_is_not_asked(
    registry: LocalPeers, peer_at: Callable[[int], LocalPeer]
) -> None:
    with pytest.raises(ControlError, match="Ada is just starting and cannot be asked yet"):
        client.get(replace(LocalPeer.here("trainer", "a-run", Path("/home")), name="Ada"), "state", registry=registry)
    with pytest.raises(ControlError, match="Ada has just ended"):
        client.post(LocalPeer(1, 1.0, "trainer", "a-run", "/home", "Ada"), "pause", {}, registry=registry)
    assert LocalPeer(1, 1.0, "trainer", "a-run", "/home", api="http://127.0.0.1:70000").port is None  # there is none
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = LocalPeer(
            2**31 - 1, 1.0, "trainer", "a-run", "/home", "Ada", f"http://127.0.0.1:{server.getsockname()[1]}"
        )
        registry.write(ended, "secret")
        with pytest.raises(ControlError, match="Ada has just ended"):  # the port may be another user's by now
            client.get(ended, "state", registry=registry)
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
