"""The page as people meet it: in a real, headless Chromium, served by the real server, over a run that moves."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from swarmcli.events import ActivityStatus, RoundFinished
from swarmcli.journal import Failure
from swarmcli.run.values import CheckpointShown, History, Rounds, RunStatus
from swarmcli.words import format_duration, format_size, roughly

from .conftest import PATIENCE, Open, Serve, expect_text
from .fake_source import JOIN_LINE, OTHERS, REACH, TRAINERS, FakeRun

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser
ATTACK = "<img src=x onerror=\"document.title='owned';window.owned=1\"><b>bold</b>"


def test_the_epoch_rises_on_an_open_page(serve: Serve, open_page: Open) -> None:
    run = FakeRun(finished_epochs=41, run_eta=5400.0)
    page = open_page(serve(run).url)
    expect_text(page, "#epoch", "41")
    expect_text(page, "#run-id", "stdlib-lm")
    expect_text(page, "#state", "Training")
    expect_text(page, "#reach", REACH)
    expect_text(page, "#run-eta", "about 90 min to the last epoch")
    run.finished_epochs, run.run_eta = 42, None
    expect_text(page, "#epoch", "42")
    expect_text(page, "#run-eta", "")
    kept_aside = run.history().evaluations[-1].loss
    expect_text(
        page,
        "#loss-readout",
        f"epoch 42: {run.epochs()[-1].loss:.4f}, on data kept aside {kept_aside:.4f}, gradient 1.23, update 0.0625",
    )
    expect_text(page, "#loss-sub", re.compile(r"^on data kept aside, epoch 40: loss [\d.]+, accuracy 0\.75\d*"))
    epoch = page.locator("#rounds tr").first.locator("td").nth(2)  # by this round the run came to 42
    assert (epoch.inner_text(), epoch.get_attribute("data-label")) == ("41", "At epoch")
    assert page.locator("section.rounds th").nth(2).inner_text() == "At epoch"


def test_sizes_and_durations_read_as_in_a_terminal(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(FakeRun(finished_epochs=1)).url)
    script = 'async ([name, values]) => values.map((await import("/static/format.js"))[name])'
    sizes, seconds = (
        [0, 999, 1000, 9940, 9960, 1.77e6, 463e3, 3.2e12],
        [0.0, 0.08, 1.24, 9.96, 99.4, 100, 7000, 200_000],
    )
    assert page.evaluate(script, ["bytes", sizes]) == [*map(format_size, sizes)]
    assert page.evaluate(script, ["duration", seconds]) == [*map(format_duration, seconds)]
    assert page.evaluate(script, ["roughly", seconds]) == [*map(roughly, seconds)]


def test_a_run_that_stands_is_told_and_no_rate_beside_it(serve: Serve, open_page: Open) -> None:
    run = FakeRun(finished_epochs=41, state="standing", waits="The run stands still: it waits for Bob.", run_eta=None)
    run.people[0] = replace(run.people[0], health="line too slow")
    page = open_page(serve(run).url)
    expect_text(page, "#state", "Waiting: the run stands still")
    expect_text(page, "#waits", "The run stands still: it waits for Bob.")
    expect_text(page, "#eta", "it does not end")
    expect_text(page, "#throughput", "–")
    row = page.locator("#peers [data-health='line too slow']")
    assert [row.locator(f".{cell}").inner_text() for cell in ("health", "rate", "loss")] == ["line too slow", "–", "–"]
    run.state, run.waits = "training", ""
    expect_text(page, "#state", "Training")
    assert page.locator("#waits").is_hidden()


def test_a_round_opens_to_show_who_took_part_and_how_long_each_stage_took(serve: Serve, open_page: Open) -> None:
    class Mended(FakeRun):
        def rounds(self, *, after: int = 0, limit: int = 100) -> list[RoundFinished]:
            first, *others = super().rounds(limit=limit)
            return [replace(first, reason="garage reduced again what lost members had"), *others][after:]

    run = Mended(finished_epochs=4)
    page = open_page(serve(run).url)
    expect_text(page, "#rounds .why", "garage reduced again what lost members had")
    drifts = [page.locator("#peers .drift").nth(index).inner_text() for index in range(4)]
    assert sorted(drifts[1:]) == ["0", "3e-7", "–"] and drifts[0] == "–"  # this one, a monitor, has not measured any
    rows = page.locator("#rounds tr:has(.opener)")
    assert [rows.nth(index).locator(".what").count() for index in range(4)] == [0, 1, 0, 0], "over states"
    opener = page.locator("#rounds .opener").first
    opener.focus()
    page.keyboard.press("Enter")
    expect_text(page, "#rounds .detail .line >> nth=0", "attic-3090 (led), garage, lab-17, relay-fra (no tensors)")
    stages = page.locator("#rounds .detail .line").nth(1).inner_text()
    assert re.fullmatch(r"looking for group 1\.3 s · awaiting trigger 20 ms · running all-reduce 0\.\d s", stages)
    run.finished_epochs = 5
    expect_text(page, "#epoch", "5")
    assert page.locator("#rounds .detail:visible").count() == 1  # news do not close what somebody reads
    page.locator("#rounds tr:has(.opener[aria-expanded=true]) td").nth(3).click()
    page.wait_for_selector("#rounds .detail", state="hidden")


def test_peers_show_what_they_do(serve: Serve, open_page: Open) -> None:
    run = FakeRun(finished_epochs=41)
    page = open_page(serve(run).url)
    expect_text(page, "#peers .name", ["monitor", "attic-3090", "büro-mac", "garage", "lab-17", "relay-fra"])
    attic = page.locator("#peers tr").nth(1)
    assert attic.locator("td").all_inner_texts()[3] == "212"
    assert attic.locator(".share").inner_text() == "41 %"
    about = page.locator("#peers .who .sub").all_inner_texts()
    assert about[1].endswith("cuda, RTX 3090 · connected directly") and about[2].endswith("mps, M3")
    assert about[3].endswith("16 cores · nobody can dial it · connected through a relay")
    assert about[5].endswith("4 cores · nobody can dial it · connected directly, opened by both ends together")
    run.people[0] = replace(run.people[0], health="not answering")
    expect_text(page, "#peers tr:nth-child(2) .health", "not answering")
    expect_text(page, "#peer-count", "5")  # who does not answer does not count
    run.people.pop(1)
    expect_text(page, "#peer-count", "4")
    run.people = [*TRAINERS, *OTHERS]
    for index, health in enumerate(("not answering", "lost", "left")):
        run.people[index] = replace(run.people[index], health=health, samples_per_second=0.0)
    expect_text(page, "#peers .health", ["in step", "not answering", "lost", "left", "in step", "in step"])
    expect_text(page, "#peer-count", "3")
    assert page.locator("#peers .rate").all_inner_texts()[1:4] == ["–", "–", "–"]


def test_a_script_that_came_in_all_the_same_would_not_run(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(FakeRun()).url)
    refused = """() => {
        const script = document.createElement("script");
        try { script.text = "window.owned = 1"; } catch { return "refused"; }
        document.body.append(script);
        return window.owned ? "ran" : "refused";
    }"""
    assert page.evaluate(refused) == "refused"
    markup = "() => { try { document.body.innerHTML = '<p>'; return 'made'; } catch { return 'refused'; } }"
    assert page.evaluate(markup) == "refused"


def test_after_a_restart_of_the_server_the_page_goes_on(serve: Serve, open_page: Open) -> None:
    first = serve(FakeRun(finished_epochs=5))
    page = open_page(first.url)
    expect_text(page, "#epoch", "5")
    first.stop()
    page.wait_for_selector('body[data-connection="lost"]')
    assert "connection to this peer is lost" in page.locator("#lost").inner_text()
    expect_text(page, "#epoch", "5")
    serve(FakeRun(finished_epochs=9), port=int(first.url.rstrip("/").rpartition(":")[2]))
    expect_text(page, "#epoch", "9")
    page.wait_for_selector("#lost", state="hidden")
    assert page.locator("#rounds tr").count() >= 9


def test_after_leaving_the_page_says_so_and_not_that_it_tries_again(serve: Serve, open_page: Open) -> None:
    run = FakeRun()
    run.activity = ActivityStatus(state="stopping", seconds_left=57.0)
    server = serve(run)
    page = open_page(server.url)
    expect_text(page, "#viewer", "the monitor")
    server.stop()
    page.wait_for_selector('body[data-connection="lost"]')
    assert "Your computer has left the run. The same command" in page.locator("#lost").inner_text()


def test_a_server_that_falls_silent_counts_as_lost(serve: Serve, chromium: Browser) -> None:
    """A frozen process keeps its connections: only the silence tells."""
    frozen = threading.Event()
    thawed = threading.Event()

    class Freezing(FakeRun):
        def look(self) -> RunStatus:
            if frozen.is_set():
                thawed.wait(60)
            return super().look()

    url = serve(Freezing(finished_epochs=5)).url
    page = chromium.new_page()
    page.set_default_timeout(PATIENCE)
    page.clock.install()
    page.goto(url + "run")
    page.wait_for_selector('body[data-connection="live"]')
    frozen.set()
    page.clock.fast_forward(8000)
    page.wait_for_selector('body[data-connection="lost"]')
    frozen.clear()
    thawed.set()
    page.clock.fast_forward(8000)
    page.wait_for_selector('body[data-connection="live"]')
    page.close()


def test_before_the_first_trainer_the_join_line_is_there_to_copy(serve: Serve, open_page: Open) -> None:
    reach = "This link works within this network only."
    run = FakeRun(finished_epochs=0, state="waiting", part=0.0, people=[OTHERS[1]], link_reach=reach)
    page = open_page(serve(run).url, permissions=["clipboard-read", "clipboard-write"])
    expect_text(page, "#invite-heading", "Waiting for the first trainer")
    expect_text(page, "#join-line", JOIN_LINE)
    expect_text(page, "#link-reach", reach)
    assert page.get_by_text("The loss appears here after the first epoch.").is_visible()
    page.get_by_role("button", name="Copy").click()
    expect_text(page, "[data-copies]", "Copied")
    assert page.evaluate("navigator.clipboard.readText()") == JOIN_LINE
    run.state, run.people = "training", [OTHERS[1], TRAINERS[0]]
    expect_text(page, "#invite-heading", "Let others join")


def test_a_run_that_has_finished_is_calm_and_says_where_its_model_is(serve: Serve, open_page: Open) -> None:
    run = FakeRun(finished_epochs=199)
    page = open_page(serve(run).url)
    expect_text(page, "#state", "Training")
    assert page.locator("#result").is_hidden()
    run.result = "saved epoch 200 at /home/<b>ada</b>/runs/stdlib-lm/monitor-1/checkpoints/epoch-000200"
    run.state, run.finished_epochs, run.part, run.people = "finished", 200, 0.0, [OTHERS[1]]
    expect_text(page, "#state", "Finished")
    expect_text(page, "#result", run.result)
    expect_text(page, "#eta", "the run is complete")
    assert page.inner_text("#samples").strip() == "" and page.inner_text("#throughput") == "–"
    assert page.locator("#invite").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_curve_can_be_read_with_the_keyboard(serve: Serve, open_page: Open) -> None:
    class Full(FakeRun):
        def look(self) -> RunStatus:
            return replace(super().look(), notice="The journal cannot be written (disk full).")

    page = open_page(serve(Full(finished_epochs=24)).url)
    expect_text(page, "#notice", "The journal cannot be written (disk full).")
    curve = page.get_by_role("slider", name="Loss", exact=True)
    curve.focus()
    assert curve.get_attribute("aria-valuenow") == "24"
    page.keyboard.press("ArrowLeft")
    assert curve.get_attribute("aria-valuenow") == "23"
    page.keyboard.press("Home")
    assert (curve.get_attribute("aria-valuetext") or "").startswith("epoch 1: 5.")
    expect_text(page, "#loss-readout", curve.get_attribute("aria-valuetext") or "")


OVERLAPS = """() => {
    const found = [], lines = [], cut = [];
    const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode, range = document.createRange();
        if (!text.textContent.trim() || text.parentElement.closest("svg, select, thead, .visually-hidden")) continue;
        range.selectNodeContents(text);
        const scrolled = text.parentElement.closest(".scroll");
        for (const box of range.getClientRects()) lines.push({ box, scrolled, words: text.textContent.trim() });
        const side = scrolled?.getBoundingClientRect();
        if (scrolled && range.getBoundingClientRect().right > side.right + 1) cut.push(scrolled);
        for (let node = text.parentElement; node.tagName !== "MAIN"; node = node.parentElement)
            if (node.scrollHeight > node.clientHeight + 2 && getComputedStyle(node).overflow !== "visible" &&
                getComputedStyle(node).maskImage === "none") cut.push(node);
    }
    lines.forEach((a, i) => lines.slice(i + 1).forEach((b) => {
        const wide = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
        const high = Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top);
        if (a.scrolled === b.scrolled && wide > 2 && high > 4) found.push([a.words, b.words]);
    }));
    return found.concat(cut.map((node) => ["cut", node.className]));
}"""


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_no_words_lie_over_others_and_no_row_is_cut(serve: Serve, open_page: Open, width: int) -> None:
    run = FakeRun(finished_epochs=147, max_epochs=12_400)
    page = open_page(serve(run).url, viewport={"width": width, "height": 900})
    page.locator(".rounds .opener").nth(2).click()
    page.locator("#checkpoints li").first.wait_for()
    assert page.evaluate(OVERLAPS) == []
    assert page.locator("#rounds .opener").count() == 25
    page.locator(".rounds .pager").get_by_role("button", name="Next").click()
    expect_text(page, ".rounds .where", "26 to 50 of 60")
    page.goto(page.url.replace("run", f"peers/{TRAINERS[0].peer_id}"))
    page.locator("#own-rounds .failed").first.wait_for()
    assert page.evaluate(OVERLAPS) == []


def test_nothing_jumps_while_the_run_goes_on(serve: Serve, open_page: Open) -> None:
    """Rows that are added on top move those below them, inside their own frames; everything else stays."""
    looked_at = threading.Event()

    class LateCurves(FakeRun):
        """The curves come after all else, as from a busy computer."""

        def history(self, **span: Any) -> History:
            looked_at.wait(60.0)
            return super().history(**span)

        # Lists that are asked for every ten seconds grow, on purpose: not within this test, however long it takes.
        def failures(self) -> Sequence[Failure]:
            return before.failures()

        def round_page(self, **span: Any) -> Rounds:
            return before.round_page(**span)

        def checkpoints(self) -> Sequence[CheckpointShown]:
            return before.checkpoints()

    before, run = FakeRun(finished_epochs=20), LateCurves(finished_epochs=20)
    page = open_page(serve(run).url, viewport={"width": 1280, "height": 2000})
    page.locator("#peers tr").nth(5).wait_for()  # what comes first takes its place
    page.locator("#failures li").first.wait_for()
    page.locator("#checkpoints li").first.wait_for()
    page.evaluate("""() => {
        window.moved = [];
        new PerformanceObserver(list => {
            for (const entry of list.getEntries()) for (const { node } of entry.sources) {
                const element = node instanceof Element ? node : node?.parentElement;
                if (element && !element.closest(".scroll")) window.moved.push(element.outerHTML.slice(0, 80));
            }
        }).observe({ type: "layout-shift" });
    }""")
    looked_at.set()
    for epoch in (21, 22, 23, 60, 61):
        run.finished_epochs = epoch
        expect_text(page, "#epoch", str(epoch))
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.evaluate("window.moved") == []


def test_the_best_checkpoint_is_the_best_of_those_evaluated_while_a_later_one_is_not(
    serve: Serve, open_page: Open
) -> None:
    class Evaluating(FakeRun):
        measured = False

        def checkpoints(self) -> Sequence[CheckpointShown]:
            newest, older = super().checkpoints()[:2]
            best = replace(older, best=not self.measured)
            return [newest if self.measured else replace(newest, loss=None, best=False), best]

    run = Evaluating(finished_epochs=49)
    page = open_page(serve(run).url)
    expect_text(page, "#checkpoints .sub >> nth=0", re.compile("^newest · .*not evaluated yet$"))
    expect_text(page, "#checkpoints .sub >> nth=1", re.compile("^best of those evaluated · .*on data kept aside$"))
    run.measured = True
    page.reload()
    expect_text(page, "#checkpoints .sub >> nth=0", re.compile("^newest, best · "))
    expect_text(page, "#checkpoints .sub >> nth=1", re.compile("^12 MB · "))


def test_two_models_of_one_run_are_an_alarm_and_the_peer_is_named(serve: Serve, open_page: Open) -> None:
    run = FakeRun(finished_epochs=41)
    page = open_page(serve(run).url)
    assert page.locator("#alarm").is_hidden()
    run.alarm = "Two models are being trained: one by monitor (epoch 41), another by garage (epoch 38)."
    run.people[2] = replace(run.people[2], health="another model")
    page.get_by_text(run.alarm).wait_for()  # to be seen
    expect_text(page, "#peers tr:nth-child(4) .health", "another model")
    run.alarm = ""
    page.wait_for_selector("#alarm", state="hidden")
