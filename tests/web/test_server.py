from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from coordinator_web import server as served
from coordinator_web.app import create_app
from coordinator_web.background import listen
from swarmcli.errors import ListenError
from swarmcli.run.values import RunStatus
from tests.simulation import in_real_time

from .dashboards import Dashboard
from .fake_source import FakeRun


def dashboard(**options: Any) -> Dashboard:
    return Dashboard(create_app(FakeRun()), **options)  # type: ignore[arg-type]


def bound(monkeypatch: pytest.MonkeyPatch, **bounds: Any) -> None:
    monkeypatch.setattr(served, "BOUNDS", replace(served.BOUNDS, **bounds))


def test_in_a_thread_it_answers_at_once_and_leaves_nothing_behind() -> None:
    before = set(threading.enumerate())
    server = dashboard()
    url = server.url
    with httpx.Client() as page:  # which keeps its connection: nobody waits for an open page
        assert page.get(url).status_code == 200
        server.stop()
        server.stop()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)  # those that answered requests end once the loop has
        assert not thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_who_connects_and_asks_for_nothing_takes_few_files_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    bound(monkeypatch, connections=8, request_seconds=0.2)
    server = dashboard()
    port = server.port
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
    silent[0].sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")  # and never the end of it
    for each in silent:
        _wait_for_the_end_of(each)
    server.stop()


def test_an_answer_that_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bound(monkeypatch, request_seconds=1.0)  # in which a busy machine sends a request
    others_ended = threading.Event()

    class Slow(FakeRun):
        def look(self) -> RunStatus:
            others_ended.wait(60.0)
            return super().look()

    server = Dashboard(create_app(Slow()))  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.get, server.url + "api/v1/status", timeout=60.0)
        for _ in range(2):
            _wait_for_the_end_of(socket.create_connection(("127.0.0.1", server.port)))
        others_ended.set()
        assert answer.result().status_code == 200
    server.stop()


def test_who_takes_nothing_of_an_answer_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bound(monkeypatch, request_seconds=1.0)  # in which a busy machine sends a request
    app, ended = FastAPI(), threading.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(1 << 16)
                await asyncio.sleep(0)  # or nobody hears that the other end has gone
        finally:
            ended.set()

    app.get("/endless")(lambda: StreamingResponse(endless()))
    server = Dashboard(app)
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(b"GET /endless HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert ended.wait(60.0)
    server.stop()


def test_however_many_visitors_come_this_computers_user_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    bound(monkeypatch, visitors=4, connections=8)
    own = set[int]()
    monkeypatch.setattr(served, "_is_of_this_computer", lambda client: client[1] in own)
    server = dashboard()
    port = server.port
    visitors = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    for each in visitors[4:]:
        _wait_for_the_end_of(each)
    with socket.socket() as user:
        user.bind(("127.0.0.1", 0))
        own.add(user.getsockname()[1])
        user.connect(("127.0.0.1", port))
        user.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert user.recv(12) == b"HTTP/1.1 200"
    for each in visitors[:4]:
        each.close()
    server.stop()


def test_an_address_of_this_computer_is_told_from_others() -> None:
    assert all(served._is_of_this_computer((host, 1)) for host in ("127.0.0.1", "::1", "::ffff:127.0.0.1"))
    assert not any(served._is_of_this_computer((host, 1)) for host in ("203.0.113.7", "fe80::1", "unix", ""))
    assert not served._is_of_this_computer(None)


def _wait_for_the_end_of(connection: socket.socket) -> None:
    with connection, contextlib.suppress(ConnectionResetError):
        connection.settimeout(60.0)
        assert connection.recv(1) == b"", "it is hung up on"


@in_real_time
async def test_on_a_loop_it_ends_with_the_task_that_serves() -> None:
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    task = asyncio.create_task(served.serve(create_app(FakeRun()), [listener]))  # type: ignore[arg-type]
    async with httpx.AsyncClient() as client:
        assert (await client.get(url)).status_code == 200
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_taken_port_and_an_address_of_another_machine_are_named_with_the_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ListenError, match=rf"cannot listen on 127\.0\.0\.1:{port}: another program has this port"):
            listen("127.0.0.1", port)
        with pytest.raises(ListenError, match="choose another one, or 0"):
            dashboard(port=port)
    for host, number, words in (
        ("203.0.113.7", 0, r"203\.0\.113\.7:0: this machine has no such address"),
        ("no-such-host.invalid", 0, r"no-such-host\.invalid"),
        ("127.0.0.1", 70000, r"127\.0\.0\.1:70000: a port is a number from 0 to 65535"),
    ):
        with pytest.raises(ListenError, match=words):
            listen(host, number)
