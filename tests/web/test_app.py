from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace

import httpx

from coordinator_web.pages import ASSETS, FRAMED, STATIC, qr_code

from .conftest import Serve
from .fake_source import PAUSED, STALLED, TRAINERS, FakeRun, peer_row

TEXTS = ["frame.html", "join.html", *(f"{page.name}.html" for page in FRAMED)]


def test_the_api_says_how_the_run_stands(serve: Serve) -> None:
    with httpx.Client(base_url=serve(FakeRun(finished_epochs=9)).url) as client:
        status = client.get("/api/v1/status").json()
        assert (status["run_id"], status["epoch"], len(status["peers"]), status["left"]) == (
            "stdlib-lm",
            9,
            6,
            "about 3 s left",
        )
        assert client.get("/api/v1/peers").json()["rows"][0]["name"] == "monitor"
        assert [row["epoch"] for row in client.get("/api/v1/epochs").json()] == list(range(1, 10))
        assert [row["epoch"] for row in client.get("/api/v1/epochs?after=7").json()] == [8, 9]
        rounds = client.get("/api/v1/rounds?after=4&limit=2").json()["rows"]
        assert [row["id"] for row in rounds] == [8, 9]
        assert client.get("/api/v1/rounds?after=4&limit=1").json()["rows"][0]["outcome"] == "committed"
        assert client.get("/api/v1/events").json()[0]["text"].startswith("gave the state")
        for query in ("after=-2", "limit=0", "limit=5000", "after=x", f"after={2**63}"):
            assert client.get(f"/api/v1/rounds?{query}").status_code == 422, query
    run = FakeRun(people=[replace(TRAINERS[0], samples_per_second=math.inf)])
    assert httpx.get(serve(run).url + "api/v1/status").json()["samples_per_second"] is None, "JSON has no such number"


def test_a_page_gets_all_of_a_run_but_its_peers_at_once(serve: Serve) -> None:
    run = FakeRun(finished_epochs=30, alerts=[STALLED], activity=PAUSED)
    with httpx.Client(base_url=serve(run).url + "api/v1/") as client:
        state = client.get("state").json()
        assert (state["run"]["epoch"], state["run"]["peers"]) == (30, [])
        assert state["me"]["sentence"] == "Paused: on battery"
        assert state["me"]["activity"]["reasons"][0]["kind"] == "battery"
        assert (state["counts"]["alive"], state["counts"]["trainers"], state["run"]["evaluation"]["epoch"]) == (
            6,
            4,
            30,
        )
        assert [alert["kind"] for alert in state["alerts"]] == ["stalled"] and state["can_control"] is False


def test_peers_come_in_pages_in_the_wanted_order(serve: Serve) -> None:
    with httpx.Client(base_url=serve(FakeRun(finished_epochs=3)).url + "api/v1/") as client:
        page = client.get("peers?offset=1&limit=2&sort=-rate&q=TRAINER").json()
        assert (page["total"], [row["name"] for row in page["rows"]]) == (4, ["lab-17", "büro-mac"])
        assert client.get("peers?sort=-share").json()["rows"][-1]["share"] is None
        assert {client.get(f"peers?{each}").status_code for each in ("sort=x", "sort=-", "offset=-1")} == {422}
        peer = client.get(f"peers/{TRAINERS[0].peer_id}").json()
        assert (peer["peer"]["name"], len(peer["history"]), peer["rounds"][0]["leader"]) == (
            "attic-3090",
            3,
            TRAINERS[0].peer_id,
        )
        assert client.get("peers/nobody").status_code == 404


def test_lists_are_given_as_csv_that_no_spreadsheet_runs(serve: Serve) -> None:
    run = FakeRun(finished_epochs=3, people=[peer_row('=HYPERLINK("evil")')])
    with httpx.Client(base_url=serve(run).url + "api/v1/export/") as client:
        answer = client.get("peers.csv")
        assert answer.headers["content-disposition"] == 'attachment; filename="peers.csv"'
        row = next(csv.DictReader(io.StringIO(answer.text)))
        assert next(iter(row)) == "peer_id" and row["name"] == '\'=HYPERLINK("evil")'
        rounds = list(csv.DictReader(io.StringIO(client.get("rounds.csv").text)))
        assert [each["id"] for each in rounds] == ["1", "2", "3"] and json.loads(rounds[0]["seconds"])
        assert client.get("secrets.csv").status_code == 404


def test_every_file_of_the_page_is_served_and_no_other(serve: Serve) -> None:
    assert {each.name for each in STATIC.iterdir()} == {*ASSETS, *TEXTS}
    with httpx.Client(base_url=serve(FakeRun()).url) as client:
        assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
        for name, kind in ASSETS.items():
            response = client.get(f"/static/{name}")
            assert response.status_code == 200 and response.headers["content-type"].startswith(kind)
        for path in ("static/run.html", "static/join.html", "static/../app.py", "static/%2e%2e/app.py", "docs"):
            assert client.get(f"/{path}").status_code == 404
    for name in [*ASSETS, *TEXTS]:  # which ask nothing of other hosts
        text = (STATIC / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and 'src="//' not in text


def test_the_page_for_newcomers_is_whole_without_a_script_and_escapes_what_strangers_wrote(serve: Serve) -> None:
    attack = "<script>alert(1)</script>'\"&$run_id"
    run = FakeRun(run_id=attack, link_reach=attack)
    text = httpx.get(serve(run).url + "join").text
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)&lt;/script&gt;&#x27;&quot;&amp;$run_id" in text
    assert "pipx install &quot;./swarmcli-" in text and "swarm join &quot;swarm://" in text
    for state in ("training", "finished"):
        text = httpx.get(serve(FakeRun(finished_epochs=3, state=state)).url + "join").text
        assert ("an epoch takes about" in text) == (state == "training")


def test_the_code_holds_the_address_of_the_page_which_a_phone_can_open(serve: Serve) -> None:
    def drawn(url: str, *, host: str, **headers: str) -> bytes | None:
        answer = httpx.get(url + "join.svg", headers={"host": host, "authorization": "Bearer look", **headers})
        code = answer.content if answer.status_code == 200 else None
        page = httpx.get(url + "join", headers={"host": host, "authorization": "Bearer look"}).text
        assert ("/join.svg" in page) == (code is not None)
        return code

    alone = serve(FakeRun()).url
    assert drawn(alone, host="127.0.0.1:8080") is None and drawn(alone, host="localhost:x") is None
    assert drawn(alone, host="192.0.2.7:8080") == qr_code("http://192.0.2.7:8080/join")
    assert drawn(alone, host="[2001:db8::7]") == qr_code("http://[2001:db8::7]/join")
    shown = serve(FakeRun(), addresses=["http://192.0.2.7:8080"], token="look", hosts=["swarm.example"]).url
    assert drawn(shown, host="127.0.0.1:8080") == qr_code("http://192.0.2.7:8080/join?token=look")
    behind = {"host": "swarm.example", "x-forwarded-proto": "https"}
    assert drawn(shown, **behind) == qr_code("https://swarm.example/join?token=look")
    assert httpx.get(shown + "join.svg").status_code == 401


def test_nothing_can_be_changed(serve: Serve) -> None:
    with httpx.Client(base_url=serve(FakeRun()).url) as client:
        for path in ("/", "/join", "/join.svg", "/api/v1/state", "/api/v1/peers"):
            assert {client.request(method, path).status_code for method in ("POST", "PUT", "DELETE", "PATCH")} == {405}
