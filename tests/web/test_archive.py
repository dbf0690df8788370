from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import httpx
import pytest

from coordinator_web.archive import TarOfDirectory

from .conftest import Serve
from .fake_source import FakeRun


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    place = tmp_path / "checkpoints" / "epoch-20"
    (place / "shards").mkdir(parents=True)
    (place / "model.safetensors").write_bytes(os.urandom(3_000_000))
    (place / "manifest.json").write_text("{}")
    (place / "shards" / ("x" * 120)).write_bytes(b"y" * 512)
    return place


def members(content: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(content)) as found:
        return {each.name: found.extractfile(each).read() for each in found}  # type: ignore[union-attr]


def test_a_checkpoint_is_downloaded_as_it_lies(checkpoint: Path, serve: Serve) -> None:
    url = serve(FakeRun(finished_epochs=20, home=checkpoint.parent)).url + "api/v1/checkpoints"
    assert [each["name"] for each in httpx.get(url).json()] == ["epoch-20"]
    answer = httpx.get(f"{url}/epoch-20.tar")
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert answer.headers["content-disposition"] == 'attachment; filename="epoch-20.tar"'
    assert members(answer.content) == {
        f"epoch-20/{path.relative_to(checkpoint).as_posix()}": path.read_bytes()
        for path in checkpoint.rglob("*")
        if path.is_file()
    }
    run = FakeRun(finished_epochs=20, home=checkpoint.parent)
    url = serve(run, token="t" * 20).url + "api/v1/checkpoints/epoch-20.tar"
    assert httpx.get(url).status_code == 401, "where others may come"
    assert httpx.get(url, headers={"Authorization": "Bearer " + "t" * 20}).status_code == 200


def test_no_name_leads_out_of_the_checkpoints(checkpoint: Path, serve: Serve) -> None:
    (checkpoint.parent.parent / "secret").mkdir()
    url = serve(FakeRun(finished_epochs=20, home=checkpoint.parent)).url
    for name in ("epoch-19", "..", "../secret", "%2e%2e%2fsecret", "epoch-20%2f..%2f..%2fsecret"):
        assert httpx.get(url + f"api/v1/checkpoints/{name}.tar").status_code == 404, name


def test_links_in_a_checkpoint_lead_nowhere_and_a_file_that_shrinks_meanwhile_ends_the_download(
    checkpoint: Path,
) -> None:
    secret = checkpoint.parent.parent / "identity.key"
    secret.write_text("secret")
    (checkpoint / "link").symlink_to(secret)
    (checkpoint / "directory").symlink_to(secret.parent)
    assert not any("link" in name or "key" in name for name in members(b"".join(TarOfDirectory(checkpoint))))
    began = TarOfDirectory(checkpoint)
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "manifest.json").symlink_to(secret)
    with pytest.raises(OSError, match=r"changed|symbolic"):
        b"".join(began)
    (checkpoint / "manifest.json").unlink()
    began = TarOfDirectory(checkpoint)
    (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(OSError, match="shorter"):
        b"".join(began)
