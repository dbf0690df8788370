from __future__ import annotations

import http.client
from contextlib import closing

import httpx
import pytest

from coordinator_web.background import is_exposed

from .conftest import Serve
from .fake_source import FakeRun


def test_addresses_and_localhost_are_answered_and_a_foreign_name_that_leads_here_is_not(serve: Serve) -> None:
    """DNS rebinding: the browser believes that it talks to the stranger's own site."""
    with httpx.Client(base_url=serve(FakeRun()).url) as client:
        for host in ("127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:8080", "192.0.2.7:80", "localhost."):
            assert client.get("/", headers={"host": host}).status_code == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example:8080", "localhost.evil.example", "", "[evil]:1"):
            for path in ("/", "/api/v1/status", "/api/v1/state", "/static/app.js"):
                assert client.get(path, headers={"host": host}).status_code in (400, 403), (host, path)
    server = serve(FakeRun(), hosts=["Monitor.Example."])
    assert httpx.get(server.url, headers={"host": "monitor.example:8080"}).status_code == 200, "it is allowed"
    assert httpx.get(server.url, headers={"host": "other.example"}).status_code == 403


def test_every_answer_carries_the_policy(serve: Serve) -> None:
    with httpx.Client(base_url=serve(FakeRun(), token="secret").url) as client:
        for path in ("/", "/?token=secret", "/api/v1/status", "/nothing"):
            headers = client.get(path).headers
            assert "default-src 'none'" in headers["content-security-policy"]
            assert "unsafe" not in headers["content-security-policy"]
            assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")
            assert "access-control-allow-origin" not in headers


def test_with_a_token_nobody_looks_without_it(serve: Serve) -> None:
    with httpx.Client(base_url=serve(FakeRun(), token="secret").url) as client:
        for path in ("/", "/api/v1/status", "/api/v1/state", "/static/app.js", "/?token=wrong", "/?token="):
            assert client.get(path).status_code == 401
        assert client.get("/api/v1/status", headers={"authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/api/v1/status", headers={"authorization": "Basic secret"}).status_code == 401
        assert client.get("/api/v1/status", headers={"cookie": 'swarm="\\'}).status_code == 401
        assert client.get("/api/v1/status", headers={"authorization": "bearer secret"}).status_code == 200


def test_the_link_with_the_token_leaves_a_cookie_and_goes_from_the_address_bar(serve: Serve) -> None:
    with httpx.Client(base_url=serve(FakeRun(), token="s3cret/ä").url) as client:
        answer = client.get("/", params={"token": "s3cret/ä", "x": "1"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/?x=1")
        assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=lax" in answer.headers["set-cookie"]
        assert client.get("/api/v1/status").status_code == 200
        stale = {
            "authorization": "Bearer of an earlier start"
        }  # as a page says it that may have changed something then
        assert client.get("/api/v1/state", headers=stale).json()["can_control"] is False
    url = httpx.URL(serve(FakeRun(), token="secret").url)
    with closing(http.client.HTTPConnection(url.host, url.port or 80, timeout=30)) as connection:
        connection.request("GET", "//evil.example/?token=secret")
        location = connection.getresponse().headers["location"]
    assert location == "/evil.example/", "the way back never leads to another host"


@pytest.mark.parametrize(
    ("host", "names", "exposed"),
    [
        ("127.0.0.1", [], False),
        ("::1", [], False),
        ("localhost", [], False),
        ("127.0.0.1", ["run.example.org"], True),
        ("0.0.0.0", [], True),
        ("", [], True),
        ("192.168.1.4", [], True),
        ("monitor", [], True),
    ],
)
def test_a_dashboard_that_others_may_reach_wants_a_token(host: str, names: list[str], exposed: bool) -> None:
    assert is_exposed(host, names) == exposed
