"""The file that newcomers install: of the very code that runs here, served from one path, and checked by pip."""

from __future__ import annotations

import html
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

import swarmcli
from coordinator_web.wheel import NAME, Wheel
from swarmcli.errors import UsageError

from .conftest import Serve
from .fake_source import FakeRun

INFO = f"swarmcli-{swarmcli.__version__}.dist-info"


def make(file: Path, **changed: str) -> Path:
    """A wheel with one file of the package."""
    files = {
        "swarmcli/words.py": (Path(swarmcli.__file__).parent / "words.py").read_text(),
        f"{INFO}/METADATA": f"Metadata-Version: 2.1\nName: swarmcli\nVersion: {swarmcli.__version__}\n",
        f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{INFO}/RECORD": "",
    }
    file.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in {**files, **changed}.items():
            archive.writestr(name, text)
    return file


def install_line(page: str) -> str:
    return html.unescape(re.search(r'id="install-line"[^>]*>([^<]*)<', page)[1])  # type: ignore[index]


def test_what_is_not_of_the_code_that_runs_here_is_refused(tmp_path: Path) -> None:
    assert Wheel.read(make(tmp_path / NAME)).sha256
    for file, why in (
        (make(tmp_path / "swarmcli-9.9.9-py3-none-any.whl"), f"is called {NAME}"),
        (make(tmp_path / "old" / NAME, **{"swarmcli/words.py": "# of last week"}), "it has another swarmcli/words.py"),
        (make(tmp_path / "evil" / NAME, **{"../evil.py": ""}), "another ../evil.py"),
        (tmp_path / "nowhere.whl", "cannot be read"),
        (Path(__file__), "cannot be read as a wheel"),
    ):
        with pytest.raises(UsageError, match=rf"--wheel .*{re.escape(why)}.*`make wheel` builds it"):
            Wheel.read(file)


def test_one_file_is_handed_out_as_it_was_when_it_was_named(serve: Serve, tmp_path: Path) -> None:
    file = make(tmp_path / NAME)
    wheel, before = Wheel.read(file), file.read_bytes()
    url = serve(FakeRun(), wheel=wheel, token="look").url
    file.write_bytes(b"exchanged")
    with httpx.Client(base_url=url, headers={"authorization": "Bearer look"}) as client:
        assert client.get(f"wheel/{NAME}").content == before
        for other in ("other.whl", "../pages.py", f"%2e%2e/{NAME}", f"{NAME}/..", f"..%2f{NAME}", "pages.py"):
            assert client.get(f"wheel/{other}").status_code == 404, other
    assert httpx.get(url + f"wheel/{NAME}").status_code == 401
    assert httpx.get(serve(FakeRun()).url + f"wheel/{NAME}").status_code == 404, "who names none hands out none"


@pytest.mark.e2e
def test_pip_takes_the_line_of_the_page_and_refuses_another_file(serve: Serve, tmp_path: Path) -> None:
    wheel = Wheel.read(make(tmp_path / NAME))
    url = serve(FakeRun(), wheel=wheel, token="look", addresses=["http://192.0.2.7:8080"]).url
    line = install_line(httpx.get(url + "join", headers={"authorization": "Bearer look"}).text)
    assert line == f'pipx install "http://192.0.2.7:8080/wheel/{NAME}?token=look#sha256={wheel.sha256}"'
    named = line.split('"')[1].replace("http://192.0.2.7:8080/", url)

    def download(what: str) -> subprocess.CompletedProcess[str]:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-index", "--isolated"]
        return subprocess.run([*pip, "-d", str(tmp_path / "got"), what], capture_output=True, text=True, timeout=300)

    done = download(named)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "got" / NAME).read_bytes() == wheel.data
    assert "THESE PACKAGES DO NOT MATCH" in download(named.replace(wheel.sha256, "0" * 64)).stderr


def test_without_a_wheel_the_page_says_from_whom_to_get_the_file(serve: Serve, tmp_path: Path) -> None:
    page = httpx.get(serve(FakeRun()).url + "join").text
    assert install_line(page) == f'pipx install "./{NAME}"' and "First get the file" in page
    run = FakeRun(install="swarmcli[datasets]")
    assert install_line(httpx.get(serve(run).url + "join").text) == f'pipx install "./{NAME}[datasets]"'
    wheel = Wheel.read(make(tmp_path / NAME))
    url = serve(run, wheel=wheel).url
    with_extra = f'pipx install "swarmcli[datasets] @ {url}wheel/{NAME}#sha256={wheel.sha256}"'
    assert install_line(httpx.get(url + "join").text) == with_extra
