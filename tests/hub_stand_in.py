"""A stand-in for the Hugging Face Hub: what huggingface_hub asks when a folder is uploaded or files are downloaded,
over HTTP.

    def test_something(hub: Hub) -> None:
        commit = hub.push("acme/tiny", {"config.json": b"{}"})
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


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
        self.history: dict[str, dict[str, dict[str, bytes]]] = {}  # files to download, by repository and commit

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def push(self, name: str, files: Mapping[str, bytes] | Path) -> str:
        """A commit with these files, or those of a directory, to which the branch main then leads."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()}
        commits = self.history.setdefault(name, {})
        told = f"{name} {len(commits)} {sorted((name, _sha256(data)) for name, data in files.items())}"
        commit = hashlib.sha1(told.encode()).hexdigest()
        commits[commit] = dict(files)
        return commit

    def leave(self) -> None:
        """From now on nobody answers at the address. Idempotent."""
        self.shutdown()
        self.server_close()

    def downloads(self) -> list[str]:
        """The names of the files that were downloaded so far."""
        places = [each.rpartition("/")[2] for each in self.asked if re.match("GET .*/(resolve|cdn)/", each)]
        commits = [commit for commits in self.history.values() for commit in commits.values()]
        named = {_sha256(data): name for commit in commits for name, data in commit.items()}
        return [named.get(place, place) for place in places]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.0"  # a connection for each request, so that none is left when nobody answers any more

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
        elif path.startswith("/cdn/"):
            self._send(hub.large[path.removeprefix("/cdn/")])
        elif found := re.fullmatch(r"/(?:api/models/)?([^/]+/[^/]+)/(revision|tree|resolve)/([^/]+)/?(.*)", path):
            self._give(hub, *found.groups())
        elif path.startswith("/lfs/"):
            hub.large[path.removeprefix("/lfs/")] = body
            self._answer({})
        elif self.command == "GET" and path.removeprefix("/api/models/") not in hub.private:
            self._answer({"error": "Repository not found"}, 404)
        else:
            self._answer(self._api(hub, path, body))

    def _give(self, hub: Hub, repo: str, what: str, revision: str, name: str) -> None:
        """One file of a commit, or its list of files."""
        commits = hub.history.get(repo, {})
        commit = list(commits)[-1] if commits and revision == "main" else revision
        if not commits:
            self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif commit not in commits:
            self._answer({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        elif what == "revision":
            names = [{"rfilename": name, "size": len(data)} for name, data in commits[commit].items()]
            self._answer({"id": repo, "sha": commit, "siblings": names, "private": False, "tags": []})
        elif what == "tree":
            self._answer([self._entry(name, data) for name, data in commits[commit].items()])
        elif name not in commits[commit]:
            self._answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        elif name.endswith(".safetensors"):  # LFS: they lie elsewhere
            data = commits[commit][name]
            hub.large[_sha256(data)] = data
            linked = {"X-Linked-Etag": f'"{_sha256(data)}"', "X-Linked-Size": str(len(data))}
            elsewhere = f"http://localhost:{hub.server_port}/cdn/{_sha256(data)}"
            place = {"Location": elsewhere, "X-Repo-Commit": commit}
            self._send(b"", 302, linked | place)
        else:
            data = commits[commit][name]
            self._send(data, headers={"ETag": f'"{self._entry(name, data)["oid"]}"', "X-Repo-Commit": commit})

    @staticmethod
    def _entry(name: str, data: bytes) -> dict[str, Any]:
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        lfs = {"lfs": {"oid": _sha256(data), "size": len(data), "pointerSize": 130}}
        return {"type": "file", "path": name, "oid": oid, "size": len(data)} | (
            lfs if name.endswith(".safetensors") else {}
        )

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

    def _answer(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, data: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def hub_stand_in() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.leave()
            thread.join()


def asked_instead(hub: Hub, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """From now on huggingface_hub asks the stand-in, here and in processes that the test starts, and keeps what it gets
    below `home`. It reads its variables when it is imported, so what it made of them is set as well."""
    from huggingface_hub import constants, hf_api

    for module in (constants, getattr(hf_api, "constants", hf_api)):  # older versions import the names
        monkeypatch.setattr(module, "ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(module, "HF_HUB_DISABLE_XET", True, raising=False)
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(home / "hub"), raising=False)
    monkeypatch.setattr(hf_api.api, "endpoint", hub.address)
    variables = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_CACHE": str(home / "hub")}
    for name, value in (variables | {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_stand_in() as server:
        asked_instead(server, monkeypatch, tmp_path / "hub-home")
        yield server
