"""The web application: the page, its JSON under /api/v1/, and the stream that keeps an open page up to date."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Annotated, Any

import segno
from fastapi import APIRouter, FastAPI, HTTPException, Query
from fastapi.responses import FileResponse, Response, StreamingResponse

from coordinator_web.feed import Feed, encode
from coordinator_web.guard import Guard
from coordinator_web.source import DashboardSource, RunStatus

STATIC = Path(__file__).parent / "static"
ASSETS = {  # a list and not a directory: nothing else is ever served
    "app.js": "text/javascript",
    "chart.js": "text/javascript",
    "format.js": "text/javascript",
    "copy.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "join.js": "text/javascript",
    "lists.js": "text/javascript",
    "style.css": "text/css",
}

After = Annotated[int, Query(ge=-1, le=2**62, description="only rows above this epoch or id")]
Limit = Annotated[int, Query(ge=1, le=2000, description="at most this many rows")]


def create_app(source: DashboardSource, *, token: str | None = None, hosts: Sequence[str] = ()) -> FastAPI:
    """The dashboard of one run. It only shows; nothing in it changes anything.

    `token`: whoever wants to look has to know it (None: everyone who reaches the port may look).
    `hosts`: names by which browsers may ask for it, beyond addresses and localhost.
    """
    app = FastAPI(title="swarm", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.feed = Feed(source)
    app.include_router(_api(source, app.state.feed), prefix="/api/v1")
    app.include_router(_page(source))
    app.add_middleware(Guard, hosts=tuple(hosts), token=token)
    return app


def _api(source: DashboardSource, feed: Feed) -> APIRouter:
    """Plain functions run in worker threads, so reading the journal does not hold up the loop."""
    api = APIRouter()

    @api.get("/status")
    def status() -> Response:
        return _json(source.look())

    @api.get("/peers")
    def peers() -> Response:
        return _json(source.look().peers)

    @api.get("/epochs")
    def epochs(after: After = -1, limit: Limit = 600) -> Response:
        return _json(source.epochs(after=after, limit=limit))

    @api.get("/rounds")
    def rounds(after: After = 0, limit: Limit = 100) -> Response:
        return _json(source.rounds(after=after, limit=limit))

    @api.get("/events")
    def events(after: After = 0, limit: Limit = 200) -> Response:
        return _json(source.events(after=after, limit=limit))

    @api.get("/stream")
    async def stream() -> Response:
        if feed.full:
            raise HTTPException(503, "too many pages are open already", {"Retry-After": "10"})
        return StreamingResponse(feed.stream(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    return api


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


def _page(source: DashboardSource) -> APIRouter:
    page = APIRouter()

    @page.get("/")
    def index() -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html")

    @page.get("/join")
    def join() -> Response:
        return Response(join_page(source.look()), media_type="text/html")

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

    return page


def join_page(status: RunStatus) -> str:
    """The two steps for somebody who has nothing installed. It needs no script but for its buttons."""
    values = {
        "run_id": status.run_id,
        "install": status.install,
        "join_line": status.join_line,
        "reach": status.link_reach,
        "with_link": "" if status.link else "hidden",
        "with_reach": "" if status.link_reach else "hidden",
        "finished": "" if status.state == "finished" else "hidden",
    }
    escaped = {name: html.escape(value) for name, value in values.items()}
    return Template((STATIC / "join.html").read_text(encoding="utf-8")).substitute(escaped)


def qr_code(link: str) -> bytes:
    """An SVG, dark on light in every colour scheme: that is what readers of such codes look for."""
    picture = io.BytesIO()
    code = segno.make_qr(link, error="m")
    code.save(picture, kind="svg", xmldecl=False, omitsize=True, border=3, dark="#1b1d21", light="#ffffff")
    return picture.getvalue()
