"""Alerts go to a server of this test's own, which answers as it is told."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from swarmcli.errors import RecipeError
from swarmcli.run.observer import message_of
from swarmcli.run.values import Alert
from swarmcli.run.webhook import Webhook
from tests.recipe.recipes import small
from tests.web.fake_source import FakeRun

ALERT = Alert(id="stalled-1", kind="stalled", text="No epoch ends.", since=100.0)


class Server:
    """Answers with `answers`, one after the other, and then with 200."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.heard: queue.Queue[tuple[str, Any]] = queue.Queue()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                server.heard.put((self.path, json.loads(body)))
                status = server.answers.pop(0) if server.answers else 200
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook?key=secret"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def posting(url: str, retry_after: tuple[float, ...] = (0.0, 0.0)) -> tuple[Webhook, queue.Queue[str]]:
    said: queue.Queue[str] = queue.Queue()
    return Webhook(url, said.put, retry_after=retry_after), said


def test_an_alert_arrives_once_and_tells_no_secret(server: Server) -> None:
    hook, said = posting(server.url)
    message = message_of(ALERT, FakeRun(finished_epochs=3).look())
    hook.post(message)
    path, heard = server.heard.get(timeout=30)
    assert path == "/hook?key=secret" and heard["kind"] == "stalled" and heard["text"] == "stdlib-lm: No epoch ends."
    assert set(heard) == {"id", "kind", "text", "since", "run_id", "epoch", "told_by"}
    hook.post({"second": 1})
    assert server.heard.get(timeout=30)[1] == {"second": 1}  # and nothing between them
    hook.close()
    assert said.empty()


def test_it_is_tried_again_where_that_may_help(server: Server) -> None:
    server.answers = [503, 429]
    hook, said = posting(server.url)
    hook.post({"n": 1})
    assert [server.heard.get(timeout=30)[1] for _ in range(3)] == [{"n": 1}] * 3
    hook.close()
    assert said.empty()


@pytest.mark.parametrize(("answers", "why"), [([302], "redirect"), ([404], "status 404"), ([500] * 3, "status 500")])
def test_what_cannot_be_delivered_is_said_without_the_address(server: Server, answers: list[int], why: str) -> None:
    server.answers = list(answers)
    hook, said = posting(server.url)
    hook.post({"n": 1})
    text = said.get(timeout=30)
    assert why in text and "127.0.0.1" in text and "secret" not in text and "hook" not in text
    assert [server.heard.get(timeout=30)[0] for _ in answers] == ["/hook?key=secret"] * len(answers)
    hook.close()
    assert server.heard.empty()


def test_nobody_waits_for_a_server_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hook, _ = posting(f"http://127.0.0.1:{silent.getsockname()[1]}/", retry_after=(3600.0,))
        hook.post({"n": 1})
        silent.accept()[0].close()  # the first try fails, and the wait for the second is cut short
        hook.close()


def test_a_recipe_allows_only_what_is_private_and_sizes_of_a_journal_that_people_can_write() -> None:
    words = "http://example.org/ ftp://127.0.0.1/ https://ada:secret@example.org/ https:// x http://127.0.0.1:0/"
    for address in words.split():
        with pytest.raises(RecipeError, match=r"local\.webhook"):
            small(f"local.webhook={address}")
    for address in ("https://example.org/x", "http://localhost:8080/", "http://127.0.0.1/", "http://[::1]:9/"):
        assert small(f"local.webhook='{address}'").local.webhook == address
    assert small("local.journal_size=50 MB").local.journal_size == 50_000_000
    for wrong in ("1 MB", "many", "-5"):
        with pytest.raises(RecipeError, match=r"local\.journal_size"):
            small(f"local.journal_size={wrong}")
