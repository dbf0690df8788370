"""The pages and what they load: a fixed list of files, and the ways to join as a text and as a picture."""

from __future__ import annotations

import html
import io
from dataclasses import dataclass
from pathlib import Path
from string import Template

import segno
from fastapi import APIRouter, HTTPException
from fastapi.responses import FileResponse, Response

from coordinator_web.source import DashboardSource, RunStatus
from swarmcli.words import amount, roughly

STATIC = Path(__file__).parent / "static"
SCRIPTS = (
    "api",
    "chart",
    "contributions",
    "control",
    "copy",
    "curves",
    "dom",
    "format",
    "join",
    "limits",
    "live",
    "map",
    "peer",
    "peers",
    "rounds",
    "run",
    "runs",
    "windowed",
    "you",
)
ASSETS = {  # a list and not a directory: nothing else is ever served
    **{f"{name}.js": "text/javascript" for name in SCRIPTS},
    "icon.svg": "image/svg+xml",
    "style.css": "text/css",
}


@dataclass(frozen=True, slots=True)
class Page:
    """One that stands in the frame: `static/NAME.html` is what it shows, `static/NAME.js` fills it."""

    name: str
    title: str
    path: str


YOU = Page("you", "You", "/")
RUN = Page("run", "The run", "/run")
MAP = Page("map", "Map", "/map")
CONTRIBUTIONS = Page("contributions", "Contributions", "/contributions")
RUNS = Page("runs", "This computer", "/runs")
PEER = Page("peer", "Peer", "")
LINKED = (YOU, RUN, MAP, CONTRIBUTIONS, RUNS)
FRAMED = (*LINKED, PEER)


def pages(source: DashboardSource) -> APIRouter:
    """Everything that a browser opens or loads by itself."""
    page = APIRouter()

    @page.get("/")
    def index() -> Response:
        """A volunteer begins with what the own computer does; who watches a run, with the run."""
        status = source.look()
        return _html(framed(RUN if status.role == "monitor" else YOU, status))

    @page.get("/peers/{peer_id}")
    def peer(peer_id: str) -> Response:
        return _html(framed(PEER, source.look()))  # the script asks for the peer that the address names

    @page.get("/join")
    def join() -> Response:
        return _html(join_page(source.look()))

    @page.get("/link.svg")
    def code() -> Response:
        """A new link is another picture under the same name; the page asks for it with another query."""
        link = source.look().link
        if not link:
            raise HTTPException(404, "this run has no link")
        return Response(qr_code(link), media_type="image/svg+xml")

    @page.get("/static/{name}")
    def asset(name: str) -> Response:
        if name not in ASSETS:
            raise HTTPException(404, "no such file")
        return FileResponse(STATIC / name, media_type=ASSETS[name])

    @page.get("/{path}")
    def linked(path: str) -> Response:
        shown = next((each for each in LINKED if each.path == f"/{path}"), None)
        if shown is None:
            raise HTTPException(404, "no such page")
        return _html(framed(shown, source.look()))

    return page


def _html(text: str) -> Response:
    return Response(text, media_type="text/html")


def framed(page: Page, status: RunStatus) -> str:
    """The page within the frame that all share. It is whole without the run's numbers, so it is there at once."""
    linked = [each for each in LINKED if each is not YOU or status.role != "monitor"]
    values = {
        "name": page.name,
        "title": page.title,
        "run_id": html.escape(status.run_id),
        "links": "\n".join(_link(each, page) for each in linked),
        "content": _text(f"{page.name}.html").rstrip("\n"),
    }
    return Template(_text("frame.html")).substitute(values)


def _link(target: Page, shown: Page) -> str:
    current = ' aria-current="page"' if target is shown else ""
    return f'        <li><a href="{target.path}"{current}>{target.title}</a></li>'


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def join_page(status: RunStatus) -> str:
    """The two steps for somebody who has nothing installed. It needs no script but for its buttons."""
    values = {
        "run_id": status.run_id,
        "install": status.install,
        "join_line": status.join_line,
        "reach": status.link_reach,
        "round": _round_in_words(status),
        "with_round": "" if status.round_bytes else "hidden",
        "with_link": "" if status.link else "hidden",
        "with_reach": "" if status.link_reach else "hidden",
        "finished": "" if status.state == "finished" else "hidden",
    }
    escaped = {name: html.escape(value) for name, value in values.items()}
    return Template(_text("join.html")).substitute(escaped)


def _round_in_words(status: RunStatus) -> str:
    """What a connection has to carry for samples to count."""
    last = status.last_epoch
    epoch = f"; an epoch takes about {roughly(last.seconds)} at present" if last is not None and last.samples else ""
    return (
        f"In each round a trainer sends {amount(status.round_bytes)} and receives as much{epoch}. A computer whose "
        "connection needs longer for that than an epoch takes follows the run: its samples cannot count."
    )


def qr_code(link: str) -> bytes:
    """An SVG, dark on light in every colour scheme: that is what readers of such codes look for."""
    picture = io.BytesIO()
    code = segno.make_qr(link, error="m")
    code.save(picture, kind="svg", xmldecl=False, omitsize=True, border=3, dark="#1b1d21", light="#ffffff")
    return picture.getvalue()
