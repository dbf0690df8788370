"""The pages and what they load: a fixed list of files, and the ways to join as a text and as a picture."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

import segno
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import FileResponse, Response

from coordinator_web.wheel import NAME, Wheel
from swarmcli.network.addresses import Scope, scope_of
from swarmcli.run.source import DashboardSource
from swarmcli.run.values import RunStatus
from swarmcli.words import format_size, roughly

WHEEL = f"wheel/{NAME}"
CODE = "/join.svg"
PICTURE = f'<img class="qr" src="{CODE}" alt="QR code of this page&#x27;s address" width="180" height="180">'
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
    "limits",
    "live",
    "paging",
    "peer",
    "peers",
    "rounds",
    "run",
    "you",
)
ASSETS = {  # a list and not a directory, so that nothing else is ever served
    **{f"{name}.js": "text/javascript" for name in SCRIPTS},
    "icon.svg": "image/svg+xml",
    "style.css": "text/css",
}


@dataclass(frozen=True, slots=True)
class Page:
    """A page within the frame: `static/NAME.html` is what it shows, `static/NAME.js` fills it."""

    name: str
    title: str
    path: str


YOU = Page("you", "You", "/")
RUN = Page("run", "The run", "/run")
CONTRIBUTIONS = Page("contributions", "Contributions", "/contributions")
PEER = Page("peer", "Peer", "")
LINKED = (YOU, RUN, CONTRIBUTIONS)
FRAMED = (*LINKED, PEER)


def pages(
    source: DashboardSource,
    addresses: Sequence[str] = (),
    token: str | None = None,
    wheel: Wheel | None = None,
) -> APIRouter:
    """Returns all routes that a browser opens or loads by itself. `addresses`, `token`, `wheel`: see `create_app`."""
    page = APIRouter()

    def elsewhere(request: Request, path: str) -> str:
        """Returns where other computers find something of this page; "": nowhere."""
        base = _asked_for(request) or next(iter(addresses), "")
        return f"{base}/{path}" + (f"?token={token}" if token else "") if base else ""

    @page.get("/")
    def index() -> Response:
        """A volunteer first sees what the own computer does; somebody who watches a run first sees the run."""
        status = source.look()
        return _html(framed(RUN if status.role == "monitor" else YOU, status))

    @page.get("/peers/{peer_id}")
    def peer(peer_id: str) -> Response:
        return _html(framed(PEER, source.look()))  # the script asks for the peer that the address names

    @page.get("/join")
    def join(request: Request) -> Response:
        file = elsewhere(request, WHEEL) or f"{request.base_url}{WHEEL}"
        return _html(join_page(source.look(), wheel, file, with_code=elsewhere(request, "join") != ""))

    if wheel is not None:

        @page.get(f"/{WHEEL}")  # our own path, not one that a request names
        def installed() -> Response:
            return Response(wheel.data, media_type="application/octet-stream")

    @page.get(CODE)
    def code(request: Request) -> Response:
        """The address of the page /join as a QR code. A phone can open that page; only `swarm` can open the link in
        it."""
        address = elsewhere(request, "join")
        if not address:
            raise HTTPException(404, "no other computer can open this page")
        return Response(qr_code(address), media_type="image/svg+xml")

    @page.get("/static/{name}")
    def asset(name: str) -> Response:
        if name not in ASSETS:
            raise HTTPException(404, "no such file")
        return FileResponse(STATIC / name, media_type=ASSETS[name])

    @page.get("/{path}")
    def linked(path: str) -> Response:
        named = next((each for each in LINKED if each.path == f"/{path}"), None)
        if named is None:
            raise HTTPException(404, "no such page")
        return _html(framed(named, source.look()))

    return page


def _html(text: str) -> Response:
    return Response(text, media_type="text/html")


def framed(page: Page, status: RunStatus) -> str:
    """Returns the page within the frame that all share. It is complete without the run's numbers, so it is there at
    once."""
    current = ' aria-current="page"'
    links = [
        f'        <li><a href="{each.path}"{current if each is page else ""}>{each.title}</a></li>'
        for each in LINKED
        if each is not YOU or status.role != "monitor"
    ]
    values = {
        "name": page.name,
        "title": page.title,
        "run_id": html.escape(status.run_id),
        "links": "\n".join(links),
        "content": _text(f"{page.name}.html").rstrip("\n"),
    }
    return Template(_text("frame.html")).substitute(values)


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _asked_for(request: Request) -> str:
    """Returns the address under which the browser has asked, if others may use it too; behind a proxy with TLS the
    proxy's. "": it is one of this computer's own."""
    try:
        name, port = request.url.hostname or "localhost", request.url.port
    except ValueError:
        return ""
    if name == "localhost" or scope_of(name) is Scope.HOST:
        return ""
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else request.url.scheme
    return f"{scheme}://{f'[{name}]' if ':' in name else name}{f':{port}' if port else ''}"


def join_page(status: RunStatus, wheel: Wheel | None = None, file: str = "", *, with_code: bool = False) -> str:
    """Returns the two steps for somebody who has nothing installed. Only its buttons need a script. `file`: where the
    wheel is; `with_code`: with a picture of the page's address."""
    extra = status.install.removeprefix("swarmcli")
    if wheel is not None:
        named = f"{status.install} @ " if extra else ""
        install = f'pipx install "{named}{file}#sha256={wheel.sha256}"'
        source = "It comes from the peer that shows this page, in the version of the run, and its SHA-256 is checked."
    else:
        install = f'pipx install "./{NAME}{extra}"'
        source = (
            f"First get the file {NAME} from whoever sent you the link, and type this line in the directory where you "
            "have saved it: swarm is not in Python's package index yet."
        )
    values = {
        "run_id": status.run_id,
        "install": install,
        "source": source,
        "join_line": status.join_line,
        "reach": status.link_reach,
        "round": _round_in_words(status),
        "with_round": "" if status.round_bytes else "hidden",
        "with_code": "" if with_code else "hidden",
        "with_reach": "" if status.link_reach else "hidden",
        "finished": "" if status.state == "finished" else "hidden",
    }
    escaped = {name: html.escape(value) for name, value in values.items()}
    return Template(_text("join.html")).substitute(escaped, picture=PICTURE if with_code else "")


def _round_in_words(status: RunStatus) -> str:
    """Says what a connection has to carry so that samples count."""
    last = status.last_epoch if status.state != "finished" else None
    epoch = f"; an epoch takes about {roughly(last.seconds)} at present" if last is not None and last.samples else ""
    return (
        f"At an epoch's end a trainer sends up to {format_size(status.round_bytes)} and receives at most as "
        f"much{epoch}. If a computer's line is too slow for that, its samples do not count, and swarm says so."
    )


def qr_code(text: str) -> bytes:
    """Returns an SVG that is dark on light in every colour scheme, as readers of QR codes expect."""
    picture = io.BytesIO()
    code = segno.make_qr(text, error="m")
    code.save(picture, kind="svg", xmldecl=False, omitsize=True, border=3, dark="#1b1d21", light="#ffffff")
    return picture.getvalue()
