from __future__ import annotations

import math
from dataclasses import replace

import httpx
import pytest

from coordinator_web.app import ASSETS, STATIC
from coordinator_web.feed import Feed

from .conftest import Serve
from .fake_source import TRAINERS, FakeRun, peer_row


def test_the_api_says_how_the_run_stands(serve: Serve) -> None:
    with httpx.Client(base_url=serve(FakeRun(finished_epochs=9)).url) as client:
        status = client.get("/api/v1/status").json()
        assert (status["run_id"], status["epoch"], len(status["peers"]), status["own"]) == ("stdlib-lm", 9, 6, None)
        assert client.get("/api/v1/peers").json()[0]["name"] == "attic-3090"
        assert [row["epoch"] for row in client.get("/api/v1/epochs").json()] == list(range(1, 10))
        assert [row["epoch"] for row in client.get("/api/v1/epochs?after=7").json()] == [8, 9]
        rounds = client.get("/api/v1/rounds?after=4&limit=2").json()
        assert [row["id"] for row in rounds] == [8, 9]
        assert client.get("/api/v1/rounds?after=4&limit=1").json()[0]["outcome"] == "committed"
        assert client.get("/api/v1/events").json()[0]["text"].startswith("gave the state")


@pytest.mark.parametrize("query", ["after=-2", "limit=0", "limit=5000", "after=x", f"after={2**63}"])
def test_a_query_out_of_bounds_is_refused(serve: Serve, query: str) -> None:
    assert httpx.get(serve(FakeRun()).url + f"api/v1/rounds?{query}").status_code == 422


def test_numbers_that_json_does_not_have_become_null(serve: Serve) -> None:
    run = FakeRun(people=[replace(TRAINERS[0], samples_per_second=math.inf)])
    response = httpx.get(serve(run).url + "api/v1/status")
    assert response.json()["samples_per_second"] is None


def test_every_file_of_the_page_is_served_and_no_other(serve: Serve) -> None:
    assert {each.name for each in STATIC.iterdir()} == {*ASSETS, "index.html", "join.html"}
    with httpx.Client(base_url=serve(FakeRun()).url) as client:
        assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
        for name, kind in ASSETS.items():
            response = client.get(f"/static/{name}")
            assert response.status_code == 200 and response.headers["content-type"].startswith(kind)
        for path in (
            "/static/index.html",
            "/static/join.html",
            "/static/../app.py",
            "/static/%2e%2e/app.py",
            "/docs",
            "/openapi.json",
        ):
            assert client.get(path).status_code == 404


def test_the_page_asks_nothing_of_other_hosts() -> None:
    for name in [*ASSETS, "index.html", "join.html"]:
        text = (STATIC / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and 'src="//' not in text


def test_the_page_for_newcomers_is_whole_without_a_script_and_escapes_what_strangers_wrote(serve: Serve) -> None:
    attack = "<script>alert(1)</script>'\"&$run_id"
    run = FakeRun(run_id=attack, link_reach=attack)
    text = httpx.get(serve(run).url + "join").text
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)&lt;/script&gt;&#x27;&quot;&amp;$run_id" in text
    assert "pipx install swarmcli" in text and "swarm join &quot;swarm://" in text


def test_the_link_is_drawn_on_the_server_as_long_as_there_is_one(serve: Serve) -> None:
    run = FakeRun()
    with httpx.Client(base_url=serve(run).url) as client:
        drawn = client.get("/link.svg")
        assert drawn.headers["content-type"].startswith("image/svg+xml") and drawn.text.startswith("<svg")
        run.link = run.link.replace("203.0.113.7", "203.0.113.8")
        assert client.get("/link.svg").text != drawn.text
        run.link = "swarm://" + "x" * 2040  # the longest that there can be
        assert client.get("/link.svg").status_code == 200
        run.link, run.join_line = "", "swarm join recipe.yaml --peer tcp://203.0.113.7:1"
        assert client.get("/link.svg").status_code == 404
        assert 'src="/link.svg" alt="QR code of the link" width="180" height="180" hidden' in client.get("/join").text


def test_nothing_can_be_changed(serve: Serve) -> None:
    with httpx.Client(base_url=serve(FakeRun()).url) as client:
        for path in ("/", "/join", "/link.svg", "/api/v1/status", "/api/v1/peers", "/api/v1/stream"):
            assert {client.request(method, path).status_code for method in ("POST", "PUT", "DELETE", "PATCH")} == {405}


def test_too_many_pages_are_turned_away_until_some_close(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Feed, "full", property(lambda feed: feed._viewers >= 1))
    url = serve(FakeRun()).url + "api/v1/stream"
    with httpx.stream("GET", url) as first:
        lines = first.iter_lines()
        assert next(lines) == "retry: 1000"
        assert httpx.get(url).status_code == 503


def test_a_name_is_sent_as_it_is(serve: Serve) -> None:
    run = FakeRun(people=[peer_row("<script>alert(1)</script>")])
    response = httpx.get(serve(run).url + "api/v1/peers")
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.json()[0]["name"] == "<script>alert(1)</script>"
