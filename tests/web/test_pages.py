"""The pages beside the run's own, in a real browser: few tests, each of which looks at much of one page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmcli.events import Reason
from swarmcli.journal import Line
from swarmcli.run.values import Alert

from .conftest import Open, Serve, expect_text
from .fake_source import (
    PAUSED,
    STALLED,
    START,
    TRAINERS,
    FakeControls,
    FakeRun,
    as_shown,
    large_run,
    peer_row,
    round_row,
    volunteer,
)

pytestmark = pytest.mark.browser
ATTACK = '<img src=x onerror="window.owned=1"><b>bold</b>'
PAGES = ("", "run", "contributions", "join")


def test_a_volunteer_pauses_goes_on_and_leaves_by_click(serve: Serve, open_page: Open) -> None:
    run = volunteer(FakeRun(finished_epochs=87, limits=as_shown()))
    controls = FakeControls(run)
    url = serve(run, controls=controls, control_token="secret").url
    page = open_page(url, "?token=secret")
    assert "secret" not in page.url
    expect_text(page, "#sentence", "Training at 168 samples a second, epoch 87 of 200")
    expect_text(page, "#speed", "168")
    expect_text(page, "#rank", "2")
    expect_text(page, "#share", "32 %")
    page.wait_for_selector("#work-chart path.line", state="attached")
    page.get_by_role("slider", name="Your samples per second by epoch").focus()  # what it did, not its pace at the end
    expect_text(page, "#work-readout", "epoch 87: 100 samples a second")

    page.get_by_label("How long to pause").select_option("for 1 hour")
    page.get_by_role("button", name="Pause").click()
    expect_text(page, "#activity", "Paused")
    assert controls.asked[-1] == ("pause", pytest.approx(controls.now + 3600, abs=600))
    page.wait_for_selector("#resume:focus")  # a look may tell of the pause before the answer to the click comes
    page.keyboard.press("Enter")
    expect_text(page, "#activity", "Training")

    page.get_by_label("How long to pause").select_option("until …")
    page.get_by_label("Until when to pause").fill("18:00")
    page.get_by_role("button", name="Pause").click()
    expect_text(page, "#activity", "Paused")
    assert controls.asked[-1][1] % 900 == 0
    page.get_by_role("button", name="Leave the run").click()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    assert controls.asked[-1][0] == "pause"
    page.get_by_role("button", name="Leave the run").click()
    page.get_by_role("button", name="Hand in, then leave").click()
    expect_text(page, "#activity", "Stopping")
    assert controls.asked[-1] == ("stop", False)
    expect_text(page, "#sentence", "Leaving: handing in, about 4 min left (1,200 samples)")
    page.get_by_role("button", name="Leave at once…").click()
    assert page.get_by_role("button", name="Hand in, then leave").is_hidden()
    page.get_by_role("button", name="Leave at once", exact=True).click()
    page.wait_for_selector("dialog", state="hidden")


@pytest.mark.parametrize("width", [360, 1100])
def test_what_it_does_stays_in_its_badge_beside_a_long_reason(serve: Serve, open_page: Open, width: int) -> None:
    reasons = (*PAUSED.reasons, Reason("busy", "other programs use this computer, " + "which takes all of it " * 8))
    run = volunteer(FakeRun(finished_epochs=8, limits=as_shown(), activity=replace(PAUSED, reasons=reasons)))
    page = open_page(serve(run).url, "", viewport={"width": width, "height": 800})
    expect_text(page, "#activity", "Paused")
    badge, card = "document.getElementById('activity')", "document.querySelector('.hero').getBoundingClientRect().right"
    assert page.evaluate(f"{badge}.scrollWidth <= {badge}.clientWidth")
    assert page.evaluate(f"{badge}.getBoundingClientRect().right <= {card}")


def test_headline_and_card_name_one_speed_and_who_is_alone_has_no_place(serve: Serve, open_page: Open) -> None:
    run = FakeRun(finished_epochs=8, people=[peer_row("ada", me=True, samples_per_second=7.34)])
    page = open_page(serve(run).url, "")
    expect_text(page, "#sentence", "Training at 7.3 samples a second, epoch 8 of 200")
    expect_text(page, "#speed", "7.3")
    assert page.inner_text("#rank") == "–" and page.inner_text("#ranked").strip() == ""
    run.people = [replace(run.people[0], samples_per_second=12.7), *TRAINERS[1:2]]
    expect_text(page, "#sentence", "Training at 13 samples a second, epoch 8 of 200")
    assert page.inner_text("#speed") == "13", "both come with one message"
    assert page.inner_text("#rank") == "2"


def test_limits_are_set_on_the_page_and_a_wrong_one_is_told(serve: Serve, open_page: Open) -> None:
    run = volunteer(FakeRun(finished_epochs=8, limits=as_shown(upload="3 MB/s", hours="22:00-08:00")))
    controls = FakeControls(run)
    del run.limits["limits"]["gpu"]  # type: ignore[index]  # as a peer without a graphics card tells them
    page = open_page(serve(run, controls=controls, control_token="secret").url, "?token=secret")
    assert page.get_by_role("textbox", name="Graphics card").count() == 0
    upload = page.get_by_role("textbox", name="Upload")
    page.wait_for_selector("#limit-upload:enabled")  # once the page knows that it may change them
    assert upload.input_value() == "3 MB/s"
    for typed, asked in (("2 MB/s", "2 MB/s"), ("", "none")):
        upload.fill(typed)
        page.keyboard.press("Tab")
        expect_text(page, "#limits-note", "Saved")
        assert controls.asked[-1] == ("limits", {"upload": asked}, True)
    page.get_by_label("keep these for the next time").uncheck()
    page.get_by_label("On battery").select_option("pauses")
    expect_text(page, "#limits-note", "Saved")
    assert controls.asked[-1] == ("limits", {"on_battery": "no"}, False)
    hours = page.get_by_role("textbox", name="Hours")
    assert hours.input_value() == "22:00-08:00"
    hours.fill("whenever")
    page.keyboard.press("Tab")
    refused = page.locator("#limits .limit:has(#limit-hours) .refused")
    refused.wait_for()
    assert "whenever" in refused.inner_text() and hours.input_value() == "whenever"  # to be put right
    hours.fill("22:00-06:00")
    page.keyboard.press("Tab")
    expect_text(page, "#limits-note", "Saved")
    assert refused.is_hidden()


def test_a_limit_that_leaves_no_part_says_so_where_it_is_set_until_that_is_over(
    serve: Serve, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat = "a round sends 1.8 MB; your limit of 100 MB/s needs 36 s: your samples cannot count here"
    run = volunteer(FakeRun(finished_epochs=8, limits=as_shown()))
    controls = FakeControls(run)
    change, limits = controls.change_limits, controls.limits

    def leads_there(changes: Any, *, keep: bool) -> None:
        change(changes, keep=keep)
        run.seat, run.state = seat, "following"

    monkeypatch.setattr(controls, "change_limits", leads_there)
    monkeypatch.setattr(controls, "limits", lambda: {**limits(), "seat": run.seat})
    page = open_page(serve(run, controls=controls, control_token="secret").url, "?token=secret")
    page.wait_for_selector("#limit-upload:enabled")
    page.get_by_role("textbox", name="Upload").fill("100 MB/s")
    page.keyboard.press("Tab")
    expect_text(page, "#limits .limit:has(#limit-upload) .seat", seat)
    expect_text(page, "#seat", seat)
    expect_text(page, "#activity", "Computing nothing")
    run.seat, run.state = "", "training"
    expect_text(page, "#activity", "Training")
    page.wait_for_selector("#limits .limit:has(#limit-upload) .seat", state="hidden")


def test_without_the_token_the_page_only_shows_and_says_so(serve: Serve, open_page: Open) -> None:
    run = volunteer(FakeRun(finished_epochs=8, limits=as_shown(upload="3 MB/s", hours="22:00-08:00"), activity=PAUSED))
    run.limits["limits"]["on_battery"]["value"] = False  # type: ignore[index]
    controls = FakeControls(run)
    server = serve(run, controls=controls, control_token="secret")
    page = open_page(server.url, "", viewport={"width": 360, "height": 800})
    expect_text(page, "#sentence", "Paused: on battery")
    page.wait_for_selector("#control-note:not([hidden])")
    assert "swarm status" in page.inner_text("#control-note")  # which prints the address with the token
    assert page.get_by_role("button", name="Pause").count() == 0
    told = page.locator("#limits .limit:not([hidden]) :is(input, select):disabled").all()
    assert [each.input_value() for each in told] == ["3 MB/s", "22:00-08:00", "no"]
    assert page.locator("#limits-keeping").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    run.limits = as_shown()
    page.wait_for_selector("#limits-none")
    changing = open_page(server.url, "#token=secret")  # as somebody writes it who knows `?token=`
    changing.wait_for_selector("#limit-upload:enabled")
    expect_text(changing, "#pause", "Stay paused")
    assert "secret" not in changing.url and changing.locator("#limit-hours").is_visible()
    other = open_page(server.url, "?token=secret")  # and then the peer is started anew, with another token
    other.wait_for_selector("#pause:enabled")
    other.evaluate("localStorage.setItem('swarm-control', 'of an earlier start')")
    other.reload()
    other.wait_for_selector("#control-note:not([hidden])")
    assert controls.asked == []


def test_of_1000_peers_a_page_at_a_time_is_shown_in_the_wanted_order(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(large_run()).url)
    pager = page.locator(".peers .pager")
    expect_text(page, ".peers .where", "1 to 25 of 1,000")
    assert page.locator("#peers tr").count() == 25 and pager.get_by_role("button", name="Previous").is_disabled()
    expect_text(page, "#peers-note", "1,000 peers")
    pager.get_by_role("button", name="Next").click()
    expect_text(page, ".peers .where", "26 to 50 of 1,000")
    page.get_by_role("button", name="Samples/s").click()
    expect_text(page, "#peers tr:nth-child(1) .rate", "69")
    expect_text(page, ".peers .where", "1 to 25 of 1,000")
    assert page.locator("th[aria-sort=descending]").count() == 1
    page.get_by_label("Find").fill("peer-0777")
    expect_text(page, "#peers-note", "1 peer found")
    page.get_by_role("link", name="peer-0777").click()
    expect_text(page, "#peer-name", "peer-0777")
    page.wait_for_selector("#loss-chart path.line", state="attached")


def test_curves_show_the_latest_part_and_go_by_time(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(FakeRun(finished_epochs=120)).url)
    curve = page.get_by_role("slider", name="Loss", exact=True)
    curve.focus()
    assert curve.get_attribute("aria-valuemax") == "120"
    page.locator("#span").select_option("the last tenth")
    for name in ("loss", "rate", "alive"):
        begins = f"Number(document.querySelector('#{name}-chart svg').getAttribute('aria-valuemin'))"
        page.wait_for_function(f"() => {begins} > 107 && {begins} < 110")
    page.locator("#span").select_option("all")
    page.wait_for_function("() => document.querySelector('#rate-chart svg').getAttribute('aria-valuemin') === '1'")
    page.get_by_label("by time").check()
    page.wait_for_function("() => document.querySelector('#loss-chart .axis-name').textContent === 'time'")
    assert page.evaluate("Number(document.querySelector('#loss-chart svg').getAttribute('aria-valuemin'))") > START


def test_what_others_write_is_text_everywhere(serve: Serve, open_page: Open) -> None:
    class Hostile(FakeRun):
        def contributions(self) -> list[Any]:
            return [replace(each, name=ATTACK, team=ATTACK) for each in super().contributions()]

        def rounds(self, *, after: int = 0, limit: int = 100) -> list[Any]:
            left = {self.people[0].peer_id: ATTACK}
            return [
                replace(round_row(1), outcome="failed", reason=ATTACK, leader=self.people[0].peer_id, left_out=left)
            ]

    run = Hostile(finished_epochs=41, run_id=ATTACK, join_line=ATTACK, waits=ATTACK)
    run.people = [
        replace(peer, name=ATTACK, device=ATTACK, version=ATTACK, role=ATTACK, trouble=ATTACK) for peer in run.people
    ]
    run.alerts = [Alert(id="x", kind="diverged", text=ATTACK, since=START)]
    run.extra_events = [Line("warning", "x", "", ATTACK, id=99, time=START)]
    url = serve(run).url
    page = open_page(url)
    for place in ("#run-id", "#waits", "#join-line", "#alerts bdi"):
        expect_text(page, place, ATTACK)
    for place in ("#peers .name", "#peers .role", "#rounds .why", "#rounds .detail", "#events bdi"):
        page.locator(place).get_by_text(ATTACK).first.wait_for(state="attached")
    for path in ("contributions", f"peers/{run.people[0].peer_id}"):
        page.goto(url + path)
        expect_text(page, "#alerts bdi", ATTACK)
        page.get_by_text(ATTACK).nth(2).wait_for(state="attached")
        assert page.locator("main b, main img").count() == 0 and page.evaluate("window.owned") is None
    page.goto(url + "contributions")
    expect_text(page, "#given-word", run.rests_on)


@pytest.mark.parametrize(("width", "wide"), [(360, False), (1280, True)])
def test_who_has_given_what_keeps_words_whole_and_explains_the_columns_that_are_there(
    serve: Serve, open_page: Open, width: int, wide: bool
) -> None:
    class Named(FakeRun):
        def contributions(self) -> list[Any]:
            return [replace(each, name="bibliothekar-12", samples=9_876_543) for each in super().contributions()]

    page = open_page(serve(Named(41)).url, "contributions", viewport={"width": width, "height": 800})
    page.wait_for_selector("#given .name")
    boxes = page.evaluate("""() => {
        const range = document.createRange();
        range.selectNodeContents(document.querySelector("#given .name"));
        return new Set([...range.getClientRects()].map((box) => box.top)).size;
    }""")
    assert boxes == 1 and page.get_by_text("Time given is the length").is_visible() == wide
    assert page.get_by_role("columnheader", name="Time given").is_visible() == wide


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "dark")])
def test_every_page_can_be_used_by_everyone(serve: Serve, open_page: Open, width: int, scheme: str) -> None:
    """By the rules of axe-core, and nothing is wider than the window."""
    axe = pytest.importorskip("axe_playwright_python")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    run = volunteer(FakeRun(41, run_id="r" * 90, limits=as_shown(upload="2 MB/s"), alerts=[STALLED]))
    run.people.append(peer_row("n" * 64, device="d" * 64))
    run.people[0] = replace(run.people[0], health="not answering")
    run.alarm = "Two models are being trained."
    url = serve(run, controls=FakeControls(run), control_token="secret").url
    still = {"reduced_motion": "reduce"}  # colours are looked at as they are once nothing fades in any more
    page = open_page(url, "", color_scheme=scheme, viewport={"width": width, "height": 900}, **still)
    found = []
    for path in (*PAGES, f"peers/{run.people[0].peer_id}"):
        page.goto(url + path)
        if path != "join":
            page.wait_for_selector('body[data-connection="live"]')
            page.wait_for_load_state("load")
        page.evaluate(script)
        told = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        found += [
            f"/{path}: {each['id']} ({each['impact']}): {node['html'][:150]} {json.dumps(node['any'])[:200]}"
            for each in told["violations"]
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"][:3]
        ]
        wide = page.evaluate("document.scrollingElement.scrollWidth")
        found += [f"/{path} is {wide} wide"] if wide > width else []
    assert found == []
