"""A recipe that came by a link makes nobody's computer ask its own network."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import fsspec.config
import pytest

from swarmcli.errors import DataError
from swarmcli.recipe import HuggingFaceDataset, parse_recipe
from swarmcli.training.data import open_source
from swarmcli.training.public_web import _proxies, _socket_to, only_public_hosts
from tests.recipe.recipes import SMALL

LINE = b'{"text": "of the own network"}\n'


class Router(ThreadingHTTPServer):
    """Stands for whatever listens in a volunteer's network. `asked`: the paths."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://localhost:{self.server_port}/lines.jsonl"


class _Handler(BaseHTTPRequestHandler):
    server: Router

    def do_HEAD(self) -> None:
        self.server.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(LINE)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(LINE)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[Router]:
    monkeypatch.setattr(fsspec.config, "conf", {})
    monkeypatch.setattr("fsspec.spec.conf", fsspec.config.conf)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Router() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def fetched(url: str) -> bytes:
    found = fsspec.filesystem("http", skip_instance_cache=True).cat(url)
    assert isinstance(found, bytes)
    return found


def test_a_name_or_an_address_of_the_own_network_is_not_even_asked(router: Router) -> None:
    assert fetched(router.url) == LINE  # as without a link
    asked = len(router.asked)
    only_public_hosts()
    for url in (router.url, router.url.replace("localhost", "127.0.0.1")):
        with pytest.raises(OSError, match="no address of the internet"):
            fetched(url)
    assert len(router.asked) == asked


@pytest.mark.parametrize("streaming", [True, False])
def test_a_recipe_of_a_link_reads_no_data_of_the_own_network(
    router: Router, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("SWARM_DATA_DIR", str(tmp_path / "joined"))
    dataset = HuggingFaceDataset(source="huggingface", path="json", data_files=(router.url,), streaming=streaming)
    linked = parse_recipe(SMALL, directory=tmp_path / "joined" / "small-1234abcd")
    with pytest.raises(DataError):
        list(open_source(linked, dataset).documents("0"))
    assert router.asked == []


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "192.168.1.1", "169.254.1.1", "100.64.0.1", "::1", "fe80::1%eth0", "fd00::1",
             "::ffff:192.168.1.1", "64:ff9b::c0a8:101", "0.0.0.0"]
)  # fmt: skip
def test_addresses_of_own_networks_get_no_socket(host: str) -> None:
    with pytest.raises(OSError, match="no address of the internet"):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        _socket_to((family, socket.SOCK_STREAM, 0, "", (host, 443)), set())


def test_hosts_of_the_internet_get_one_and_so_does_the_users_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:3128")
    monkeypatch.setenv("no_proxy", "localhost")
    allowed = _proxies()
    for place in (("8.8.8.8", 443), ("64:ff9b::808:808", 443), ("127.0.0.1", 3128)):
        _socket_to((socket.AF_INET, socket.SOCK_STREAM, 0, "", place), allowed).close()
    with pytest.raises(OSError, match=r"127\.0\.0\.1 is no address"):
        _socket_to((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 80)), allowed)
