"""Small ends of connections that are wrong in one way each, and homes of peers."""

from __future__ import annotations

import socket
import sqlite3
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swarmcli.events import Noticed
from swarmcli.journal import JOURNAL_NAME, Journal
from swarmcli.network.identity import Identity
from swarmcli.network.key_file import create_key_file
from swarmcli.network.transports.tcp.handshake import GreetingKind, Message, listener_context
from tests.journal.samples import RUN, Clock, averaging_round, epoch

OTHER = Identity.from_seed(b"somebody else")


@contextmanager
def listener(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A port at which each connection is served so; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            with suppress(OSError):  # the test has ended
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextmanager
def nobody() -> Iterator[str]:
    """A port that is taken and at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{taken.getsockname()[1]}"


def speaks_http(connection: socket.socket) -> None:
    connection.recv(1)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def speaks_version_9(connection: socket.socket) -> None:
    """TLS as a peer's, and then a greeting of a version to come."""
    with listener_context(OTHER).wrap_socket(connection, server_side=True) as channel:
        channel.recv(1000)
        channel.sendall(Message(GreetingKind.REFUSAL, b"another version", version=9).encode())
        with suppress(ssl.SSLError):
            channel.recv(1000)


def home_with(directory: Path, *, text: str = "all is well", ended: bool = True) -> Path:
    """The directory of a peer that has run."""
    home = directory / "a-run-abcdefgh" / "a-run" / "trainer-1"
    home.mkdir(parents=True)
    (home.parent.parent / "recipe.yaml").write_text("")
    create_key_file(home / "identity.key")
    journal = Journal(home / JOURNAL_NAME, run=RUN, clock=Clock())
    for event in (epoch(1), averaging_round(1), Noticed("info", text)):
        journal.record(event)
    journal.close("done")
    if not ended:
        with sqlite3.connect(home / JOURNAL_NAME) as database:
            database.execute("UPDATE runs SET finished = NULL, pid = 2147483647")
        database.close()
    return home
