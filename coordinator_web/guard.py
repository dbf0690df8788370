"""Every request passes this first: is it meant for this dashboard, and may its sender look?

A stranger's page, open in the same browser, must not read the dashboard by giving its own name this machine's address
(DNS rebinding). So the Host header has to be an address, `localhost`, or a name that the user has allowed.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """ASGI middleware. `hosts` are names, beyond addresses and localhost, under which the dashboard may be asked for.
    With a `token` every request has to bring it: once as `?token=…`, which leaves a cookie, or as a bearer token.

    The `control` token lets its owner look as well. A link with it hands it to the page after the `#`, which browsers
    send to nobody; see `coordinator_web.control` for why it is never a cookie.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: Iterable[str] = (), token: str | None = None, control: str | None = None
    ) -> None:
        self._app = app
        self._hosts = {"localhost", *(host.lower().rstrip(".") for host in hosts)}
        self._token = token
        self._control = control
        # one for each dashboard of a host
        self._cookie = "swarm-" + hashlib.sha256((token or "").encode()).hexdigest()[:12]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        answer: ASGIApp = self._refusal(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if not self._is_own_name(headers.get("host", "")):
            text = "This dashboard does not know that name; open it by its address, or name it with --web-name.\n"
            return PlainTextResponse(text, 403)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        offered = query.pop("token", [""])[-1]
        if _equal(offered, self._control):
            return self._remember(scope, query, fragment=f"#control={self._control}")
        if _equal(offered, self._token):
            return self._remember(scope, query)
        tokens = (self._token, self._control)
        if self._token is None or any(_equal(brought, each) for brought in self._brought(headers) for each in tokens):
            return None
        return PlainTextResponse(
            "This dashboard asks for its token: open the link that the command printed (`swarm status` prints it, too) "
            "or send the token as 'Authorization: Bearer …'.\n",
            401,
            {"WWW-Authenticate": "Bearer"},
        )

    def _is_own_name(self, host: str) -> bool:
        name = host.lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        if name.rstrip(".") in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _brought(self, headers: Headers) -> Iterator[str]:
        """A page sends both, and the one after `Bearer` may be that of an earlier start."""
        scheme, _, offered = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            yield offered.strip()
        with suppress(CookieError):
            if (cookie := SimpleCookie(headers.get("cookie", "")).get(self._cookie)) is not None:
                yield cookie.value

    def _remember(self, scope: Scope, query: dict[str, list[str]], fragment: str = "") -> Response:
        """Redirects to the same address without the token, so that it does not stay in the history or get shared by
        accident."""
        rest = urlencode(query, doseq=True)
        path = "/" + scope["path"].lstrip("/") + ("?" + rest if rest else "")
        response = RedirectResponse(path + fragment, 303)
        if self._token is not None:
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
        return response


def _equal(offered: str, token: str | None) -> bool:
    return token is not None and secrets.compare_digest(offered.encode(), token.encode())
