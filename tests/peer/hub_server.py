"""A stand-in for the Hugging Face Hub: what huggingface_hub asks when a folder is uploaded, over HTTP."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """Repositories by name: private or not, and the files of their last commit."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []  # their titles
        self.asked: list[str] = []  # methods and paths
        self.tokens: set[str] = set()
        self.large: dict[str, bytes] = {}  # by their SHA-256
        self.fail = 0  # so many of the next requests are refused

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self._handle()

    do_PUT = do_GET = do_HEAD = do_POST

    def _handle(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.asked.append(f"{self.command} {path}")
        if token := self.headers.get("Authorization"):
            hub.tokens.add(token)
        if hub.fail:
            hub.fail -= 1
            self._answer({"error": "your token hf_secretsecret is not allowed to do this"}, 403)
        elif path.startswith("/lfs/"):
            hub.large[path.removeprefix("/lfs/")] = body
            self._answer({})
        elif self.command == "GET" and path.removeprefix("/api/models/") not in hub.private:
            self._answer({"error": "Repository not found"}, 404)
        else:
            self._answer(self._api(hub, path, body))

    def _api(self, hub: Hub, path: str, body: bytes) -> Any:
        repo = path.removeprefix("/api/models/").partition("/preupload")[0].partition("/commit")[0]
        match self.command, path:
            case "POST", "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                hub.private.setdefault(name, asked.get("private", asked.get("visibility") == "private"))
                return {"url": f"{hub.address}/{name}", "name": name, "id": "1"}
            case "POST", "/api/validate-yaml":
                return {"warnings": [], "errors": []}
            case "POST", _ if "/preupload/" in path:
                modes = [
                    {"path": each["path"], "shouldIgnore": False, "oid": None}
                    | {"uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular"}
                    for each in json.loads(body)["files"]
                ]
                return {"files": modes}
            case "POST", _ if path.endswith("/info/lfs/objects/batch"):
                wanted = json.loads(body)["objects"]
                upload = [
                    {**each, "actions": {"upload": {"href": f"{hub.address}/lfs/{each['oid']}"}}} for each in wanted
                ]
                return {"transfer": "basic", "objects": upload}
            case "POST", _ if "/commit/" in path:
                self._commit(hub, repo, [json.loads(line) for line in body.splitlines() if line])
                return {"commitUrl": f"{hub.address}/{repo}/commit/1", "commitOid": "1" * 40, "success": True}
            case "GET", _ if path.startswith("/api/models/"):
                return {"id": repo, "sha": "1" * 40, "siblings": []}
        return {}

    def _commit(self, hub: Hub, repo: str, lines: list[dict[str, Any]]) -> None:
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                hub.commits.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.large[value["oid"]]
        hub.files[repo] = files

    def _answer(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def hub_server() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
