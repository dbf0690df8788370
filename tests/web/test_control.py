"""The routes that change something: for the peer's own user, and nobody else who can send a request."""

from __future__ import annotations

import re

import httpx
import pytest

from coordinator_web.pages import STATIC
from swarmcli.recipe.limits import KEYS

from .conftest import Serve
from .fake_source import FakeControls, FakeRun, as_shown

TOKEN = "the control token"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
CHANGES = [("POST", "pause"), ("POST", "resume"), ("POST", "stop"), ("PATCH", "limits")]


@pytest.fixture
def controls() -> FakeControls:
    return FakeControls(FakeRun(limits=as_shown()))


@pytest.fixture
def url(serve: Serve, controls: FakeControls) -> str:
    return serve(controls.run, controls=controls, control_token=TOKEN).url


def test_whoever_has_the_token_pauses_resumes_stops_and_limits(url: str, controls: FakeControls) -> None:
    with httpx.Client(base_url=url + "api/v1/", headers=BEARER) as client:
        assert client.post("pause", json={"until": 4e9}).status_code == 422  # in more than a year
        assert client.post("pause", json={"seconds": 60, "until": 4e9}).status_code == 422
        assert client.post("pause", json={}).json()["state"] == "paused"
        assert client.get("control").json()["activity"]["reasons"][0]["text"] == "by you"
        client.post("resume", json={})
        client.post("stop", json={})
        answer = client.patch("limits", json={"changes": {"upload": "2 MB/s"}, "keep": False})
        assert answer.json() == client.get("limits").json() == as_shown(upload="2 MB/s")
        limited = ("limits", {"upload": "2 MB/s"}, False)
        assert controls.asked == [("pause", None), ("resume",), ("stop", False), limited]
        assert client.get("state").json()["can_control"] is True
        assert httpx.get(url + "api/v1/state").json()["can_control"] is False
        own = {"Origin": url.rstrip("/"), "Sec-Fetch-Site": "same-origin"}
        assert client.post("stop", json={"now": True}, headers=own).status_code == 200
        client.get("control")  # by then what follows an answer is done: at once is answered before the end
        assert controls.asked[4:] == [("stop", True), ("end",)]


def test_the_page_has_a_field_for_every_limit() -> None:
    listed = re.search(r"^const LIMITS = \{(.*?)^\};", (STATIC / "limits.js").read_text(), re.DOTALL | re.MULTILINE)
    assert listed and sorted(re.findall(r"^  (\w+): \[", listed[1], re.MULTILINE)) == sorted(KEYS)


def test_what_cannot_be_done_is_said_in_a_sentence(url: str, controls: FakeControls) -> None:
    with httpx.Client(base_url=url + "api/v1/", headers=BEARER) as client:
        answer = client.patch("limits", json={"changes": {"colour": 1}})
        assert answer.status_code == 422 and "colour" in answer.json()["detail"]
        for body in (b"{", b'{"seconds": -1}', b'{"seconds": "1"}', b'{"secnods": 1}', b"[" * 60_000, b"null"):
            headers = {"Content-Type": "application/json"}
            assert client.post("pause", content=body, headers=headers).status_code == 422
        assert client.post("pause", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
        big = client.post("pause", content=b" " * 100_000, headers={"Content-Type": "application/json"})
        assert big.status_code == 413
    assert controls.asked == []


def test_nobody_without_the_token_even_where_all_may_look(url: str, controls: FakeControls) -> None:
    with httpx.Client(base_url=url + "api/v1/", cookies={"swarm": TOKEN, "control": TOKEN}) as client:
        for method, path in [*CHANGES, ("GET", "limits"), ("GET", "control")]:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
                assert client.request(method, path, json={}, headers=headers).status_code == 401, path
            assert client.request(method, f"{path}?token=wrong", json={}).status_code == 401
            link = client.request(method, f"{path}?token={TOKEN}", json={})
            assert link.status_code == 303  # it leads on to the same place, and changes nothing
    assert controls.asked == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},  # of a sandboxed frame
        {"Origin": "http://127.0.0.1:9999"},  # another user's server on this computer
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_page_of_another_site_changes_nothing_even_with_the_token(
    url: str, controls: FakeControls, headers: dict[str, str]
) -> None:
    with httpx.Client(base_url=url + "api/v1/") as client:
        for method, path in CHANGES:
            answer = client.request(method, path, json={"changes": {}}, headers={**BEARER, **headers})
            assert answer.status_code == 403, path
            preflight = client.options(path, headers={"Access-Control-Request-Method": method, **headers})
            assert preflight.status_code == 405 and "access-control-allow-origin" not in preflight.headers
    # DNS rebinding: for the browser it is one site, so what it says of itself is of no help.
    rebound = {"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}
    for more in ({}, BEARER):
        assert httpx.post(url + "api/v1/stop", json={}, headers={**rebound, **more}).status_code == 403
    assert controls.asked == []


def test_the_link_hands_the_token_to_the_page_and_to_no_cookie(url: str) -> None:
    answer = httpx.get(url, params={"token": TOKEN, "x": "1"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/?x=1#control=the%20control%20token")
    assert "set-cookie" not in answer.headers


def test_who_may_only_look_controls_nothing_and_who_controls_may_look(serve: Serve, controls: FakeControls) -> None:
    url = serve(controls.run, token="look", controls=controls, control_token=TOKEN).url
    looks = {"Authorization": "Bearer look"}
    assert httpx.get(url + "api/v1/state", headers=looks).status_code == 200
    assert httpx.post(url + "api/v1/stop", json={}, headers=looks).status_code == 401
    assert httpx.get(url + "api/v1/state", headers=BEARER).status_code == 200
    assert httpx.get(url + "api/v1/state").status_code == 401
    cookies = httpx.get(url, params={"token": TOKEN}).cookies  # with which the page is shown, and nothing else
    assert list(cookies.values()) == ["look"]
    assert controls.asked == []
