"""The web application: the pages, and their JSON under /api/v1/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import Response, StreamingResponse

from coordinator_web.archive import TarOfDirectory
from coordinator_web.control import Controls, as_json, brings, control
from coordinator_web.guard import Guard
from coordinator_web.pages import pages
from coordinator_web.wheel import Wheel
from swarmcli.journal import Axis
from swarmcli.run.source import DashboardSource
from swarmcli.run.tables import EXPORTS, csv_of
from swarmcli.run.views import SORTED_BY

After = Annotated[int, Query(ge=-1, le=2**62, description="only rows above this epoch or id")]
Limit = Annotated[int, Query(ge=1, le=2000, description="at most this many rows")]
Offset = Annotated[int, Query(ge=0, le=2**31, description="after this many rows")]
Sort = Annotated[str, Query(pattern=f"^(-?({'|'.join(SORTED_BY)}))?$", description="a minus before it: backwards")]
Search = Annotated[str, Query(max_length=100)]
From = Annotated[
    float | None, Query(alias="from", ge=0, le=1e11, allow_inf_nan=False, description="seconds since 1970")
]


def create_app(
    source: DashboardSource,
    *,
    token: str | None = None,
    hosts: Sequence[str] = (),
    addresses: Sequence[str] = (),
    wheel: Wheel | None = None,
    controls: Controls | None = None,
    control_token: str = "",
) -> FastAPI:
    """Returns the dashboard of one run. Without `controls` it only shows, and nothing in it changes anything.

    `token`: a visitor has to know it to look (None: everyone who reaches the port may look). `hosts`: names by which
    browsers may ask for it, beyond addresses and localhost. `addresses`: where other computers find it, as
    `http://host:port`, best first. `wheel`: the file that newcomers install swarm from; only this one is handed out.
    `controls`: what its own user may change, with the `control_token`.
    """
    app = FastAPI(title="swarm", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.source = source
    app.state.control_token = control_token if controls is not None else ""
    app.include_router(api)
    app.include_router(pages(source, addresses, token, wheel))
    if controls is not None:
        app.include_router(control(controls, control_token), prefix="/api/v1")
    app.add_middleware(Guard, hosts=tuple(hosts), token=token, control=control_token or None)
    return app


# plain functions run in worker threads, so reading the journal does not block the loop
api = APIRouter(prefix="/api/v1")


async def _source(request: Request) -> DashboardSource:
    found: DashboardSource = request.app.state.source
    return found


Source = Annotated[DashboardSource, Depends(_source)]


@api.get("/status")
def status(source: Source) -> Response:
    return as_json(source.look())


@api.get("/state")
def state(source: Source, request: Request) -> Response:
    return as_json(replace(source.overview(), can_control=_can_control(request)))


@api.get("/peers")
def peers(source: Source, offset: Offset = 0, limit: Limit = 100, sort: Sort = "", q: Search = "") -> Response:
    return as_json(source.peers(offset=offset, limit=limit, sort=sort, query=q))


@api.get("/peers/{peer_id}")
def peer(source: Source, peer_id: str) -> Response:
    found = source.peer(peer_id)
    if found is None:
        raise HTTPException(404, "no such peer is known here")
    return as_json(found)


@api.get("/history")
def history(source: Source, begin: From = None, points: Limit = 300, by: Axis = "time") -> Response:
    return as_json(source.history(begin=begin, points=points, by=by))


@api.get("/epochs")
def epochs(source: Source, after: After = -1, limit: Limit = 600) -> Response:
    return as_json(source.epochs(after=after, limit=limit))


@api.get("/rounds")
def rounds(source: Source, after: After = 0, limit: Limit = 100) -> Response:
    return as_json(source.round_page(after=after, limit=limit))


@api.get("/failures")
def failures(source: Source) -> Response:
    return as_json(source.failures())


@api.get("/checkpoints")
def checkpoints(source: Source) -> Response:
    return as_json(source.checkpoints())


@api.get("/checkpoints/{name}.tar")
def checkpoint(source: Source, name: str) -> Response:
    directory = source.checkpoint(name)
    try:
        found = TarOfDirectory(directory) if directory is not None else None
    except OSError:
        found = None  # another one has replaced it on the disk
    if found is None:
        raise HTTPException(404, "there is no such checkpoint (any more)")
    headers = {**_attachment(f"{name}.tar"), "Content-Length": str(found.length)}
    return StreamingResponse(iter(found), media_type="application/x-tar", headers=headers)


@api.get("/contributions")
def contributions(source: Source) -> Response:
    return as_json(source.contributions())


@api.get("/export/{name}.csv")
def export(source: Source, name: str) -> Response:
    if name not in EXPORTS:
        raise HTTPException(404, "no such list")
    file = _attachment(f"{name}.csv")
    return StreamingResponse(csv_of(*source.export(name)), media_type="text/csv; charset=utf-8", headers=file)


@api.get("/events")
def events(source: Source, after: After = 0, limit: Limit = 200) -> Response:
    return as_json(source.events(after=after, limit=limit))


def _can_control(request: Request) -> bool:
    """Whether the request brings the token with which this peer is controlled."""
    token: str = request.app.state.control_token
    return bool(token) and brings(request.headers, token)


def _attachment(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}
