"""A stranger's page in the browser of somebody whose own page may control a peer: in a real, headless Chromium."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from .conftest import PATIENCE, Serve
from .fake_source import FakeControls, FakeRun
from .test_control import TOKEN

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

HOSTILE = """
<form id=form method=post target=frame enctype="text/plain" action="{url}api/v1/stop"><input name="{{}}"></form>
<iframe name=frame></iframe><iframe src="{url}"></iframe>
<script>
const tries = [
  fetch("{url}api/v1/stop", {{method: "POST", mode: "no-cors", credentials: "include", body: "{{}}"}}),
  fetch("{url}api/v1/stop", {{method: "POST", credentials: "include", body: "{{}}"}}),
  fetch("{url}api/v1/stop", {{method: "POST", headers: {{Authorization: "Bearer {token}"}}, body: "{{}}"}}),
  fetch("{url}api/v1/limits", {{method: "PATCH", headers: {{"Content-Type": "application/json"}}, body: "{{}}"}}),
  fetch("{url}api/v1/state", {{credentials: "include"}}),
];
form.submit();
Promise.allSettled(tries).then((ends) => {{
  const read = ends.map((end) => end.status === "fulfilled" && end.value.type !== "opaque");
  const kept = JSON.stringify([localStorage.length, sessionStorage.length, document.cookie.includes("{token}")]);
  document.title = read.join() + " " + kept;
}});
</script>
"""


@contextmanager
def served(page: Callable[[], str], seen: list[str]) -> Iterator[int]:
    """A stranger's server on this computer; what browsers send to it is `seen`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(str(self.headers))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page().encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_it_changes_nothing_and_reads_nothing(serve: Serve, chromium: Browser) -> None:
    controls, seen = FakeControls(FakeRun(3)), []
    url = serve(controls.run, token="look", controls=controls, control_token=TOKEN).url
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE)
    own = context.new_page()
    own.goto(f"{url}?token={TOKEN}")
    own.wait_for_function("localStorage.getItem('swarm-control') !== null")
    assert TOKEN not in own.url and all(TOKEN not in cookie["value"] for cookie in context.cookies())
    with served(lambda: HOSTILE.format(url=url, token=TOKEN), seen) as port:
        stranger = context.new_page()
        stranger.goto(f"http://localhost:{port}/")
        stranger.wait_for_function("document.title")
        assert stranger.title() == "false,false,false,false,false [0,0,false]"
    assert controls.asked == []
    assert TOKEN not in "".join(seen)
    context.close()
