"""Pause, resume, stop and limits: the routes that change something, for the peer's own user alone.

A request has to bring the token of this process as `Authorization: Bearer …`, wherever it comes from and whoever may
look. A cookie would not do: browsers send the cookies of 127.0.0.1 to every port of it, also to another user's server,
and a stranger's page can have a browser send them. What a browser says of itself is checked besides: a request that
another site's page has sent is refused, whatever it brings.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import Response
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool

from swarmcli.errors import SwarmError
from swarmcli.events import ActivityStatus
from swarmcli.machine.moments import LONGEST

T = TypeVar("T")


class Controls(Protocol):
    """The routes change a peer through this. Worker threads call the methods, which raise SwarmError for what cannot be
    done."""

    def activity(self) -> ActivityStatus:
        """The peer's present activity."""
        ...

    def pause(self, until: float | None, seconds: float | None = None) -> None:
        """Pauses until that moment (seconds since 1970), or until `resume`. `seconds`: the moment was given as a
        duration, which counts even if the clock is set meanwhile."""
        ...

    def resume(self) -> None: ...

    def stop(self, *, now: bool) -> None:
        """Stops the peer once it has handed in what it has computed; `now`: at once, and then `end` follows."""
        ...

    def end(self) -> None:
        """Ends the process at once."""
        ...

    def limits(self) -> Mapping[str, Any]: ...

    def change_limits(self, changes: Mapping[str, Any], *, keep: bool) -> None:
        """`keep`: also for later starts of this user's peers."""
        ...


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For so many seconds, or until a moment in seconds since 1970; neither: until `resume`."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=LONGEST)] | None = None
    until: Annotated[float, msgspec.Meta(gt=0, le=1e12)] | None = None


class ResumeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class StopRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    now: bool = False


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    changes: dict[str, Any]
    keep: bool = True


def control(controls: Controls, token: str) -> APIRouter:
    """The routes, for requests that bring the `token`."""

    def check(request: Request) -> None:
        check_origin(request.headers)
        if not brings(request.headers, token):
            raise HTTPException(
                401,
                "this needs the token of the peer: open the link with it, or use the command swarm",
                {"WWW-Authenticate": "Bearer"},
            )

    api = APIRouter(dependencies=[Depends(check)])

    @api.get("/control")
    def look() -> Response:
        return as_json({"activity": controls.activity(), "limits": controls.limits()})

    @api.post("/pause")
    async def pause(request: Request) -> Response:
        wish = await _body(request, Pause)
        if wish.seconds is not None and wish.until is not None:
            raise HTTPException(422, "a pause lasts for some seconds or until a moment, not both")
        now = time.time()
        until = wish.until if wish.seconds is None else now + wish.seconds
        if until is not None and not now < until <= now + LONGEST:
            raise HTTPException(422, "a pause ends in the future, and within a year")
        return await _answer(lambda: controls.pause(until, wish.seconds), controls.activity)

    @api.post("/resume")
    async def resume(request: Request) -> Response:
        await _body(request, ResumeRequest)
        return await _answer(controls.resume, controls.activity)

    @api.post("/stop")
    async def stop(request: Request) -> Response:
        wish = await _body(request, StopRequest)
        answer = await _answer(lambda: controls.stop(now=wish.now), controls.activity)
        if wish.now:
            answer.background = BackgroundTask(controls.end)  # after the answer has been sent
        return answer

    @api.get("/limits")
    def limits() -> Response:
        return as_json(controls.limits())

    @api.patch("/limits")
    async def change(request: Request) -> Response:
        wish = await _body(request, Change)
        return await _answer(lambda: controls.change_limits(wish.changes, keep=wish.keep), controls.limits)

    return api


def brings(headers: Mapping[str, str], token: str) -> bool:
    """Whether a request carries the token."""
    scheme, _, offered = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and secrets.compare_digest(offered.strip().encode(), token.encode())


def check_origin(headers: Mapping[str, str]) -> None:
    """Raises 403 for a request that a browser has made for a page of another site. Programs send no such headers."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    own = origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()
    if not own or site not in ("none", "same-origin"):
        raise HTTPException(403, "a page of another site may not do this")


async def _body(request: Request, kind: type[T]) -> T:
    """Returns the JSON that was sent, bounded before it is read."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "send JSON, as application/json")
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > 1 << 16:
            raise HTTPException(413, "at most 65536 bytes")
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, f"this cannot be read: {error}") from error


async def _answer(change: Callable[[], None], look: Callable[[], object]) -> Response:
    try:
        await run_in_threadpool(change)
    except SwarmError as error:
        raise HTTPException(422, str(error)) from error
    return as_json(await run_in_threadpool(look))


def as_json(value: Any) -> Response:
    """Encodes a value; numbers that JSON does not have become null."""
    return Response(msgspec.json.encode(value), media_type="application/json")
