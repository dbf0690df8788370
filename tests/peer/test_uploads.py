"""What is sent of a checkpoint, when, and what a failure does: with a stand-in for the Hub, over HTTP."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from swarmcli.events import Event, Events, Noticed
from swarmcli.peer.uploads import Uploads, hub, without_tokens
from swarmcli.recipe import UploadSettings
from tests.hub_stand_in import Hub
from tests.hub_stand_in import hub as hub_server

__all__ = ["hub_server"]


MORE = ("recipe.yaml", "evaluation.json")  # what the model came from, and how good it is
TOKEN = "another-kind-of-token"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, hub_server: Hub) -> Hub:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub_server


def checkpoint(directory: Path, epoch: int = 12) -> Path:
    path = directory / "checkpoints" / f"epoch-{epoch:06d}"
    path.mkdir(parents=True)
    for name in (
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "training.safetensors",
        "checkpoint.json",
        *MORE,
    ):
        (path / name).write_text(f"{name} of {epoch}")
    (path / "stream.json").write_text("where this peer's data was")
    (path / "README.md").write_text("---\nlicense: unknown\n---\n")
    return path


class Told:
    def __init__(self) -> None:
        self.events = Events()
        self.texts: list[str] = []
        self._changed = threading.Condition()
        self.events.subscribe(self._hear)

    def _hear(self, event: Event) -> None:
        assert isinstance(event, Noticed)
        with self._changed:
            self.texts.append(event.text)
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.texts) >= count, 60)


def test_the_model_goes_to_a_repository_that_is_made_for_it(server: Hub, tmp_path: Path) -> None:
    told, path = Told(), checkpoint(tmp_path)
    (tmp_path / "upload-000003-1").mkdir()  # what a killed process left
    uploads = Uploads(tmp_path, hub(UploadSettings(repo="ada/first")), told.events)
    uploads.offer(path, 2.5)
    uploads.close(lambda: False)
    assert server.private == {"ada/first": True}
    assert set(server.files["ada/first"]) == {"model.safetensors", "config.json", "tokenizer.json", "README.md", *MORE}
    assert server.files["ada/first"]["model.safetensors"] == b"model.safetensors of 12"
    assert server.commits == ["epoch 12, evaluation loss 2.5000"]
    assert told.texts == [f"epoch 12, evaluation loss 2.5000 is at {server.address}/ada/first"]
    assert server.tokens == {f"Bearer {TOKEN}"} and TOKEN not in "".join(told.texts)
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoints"], "nothing is left behind"


def test_a_failure_is_told_without_a_token_and_the_next_checkpoint_is_tried(
    server: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.fail = 1
    told = Told()
    uploads = Uploads(tmp_path, hub(UploadSettings(repo="ada/first", private=False)), told.events)
    uploads.offer(checkpoint(tmp_path))
    told.wait_for(1)
    uploads.offer(checkpoint(tmp_path, 13))
    uploads.close(lambda: False)
    assert "epoch 12 is not uploaded" in told.texts[0] and "403" in told.texts[0]
    assert "epoch 13 is at" in told.texts[1] and server.private == {"ada/first": False}
    assert "secretsecret" not in caplog.text + "".join(told.texts) and TOKEN not in caplog.text
    assert without_tokens(f"hf_abcdefgh and {TOKEN}") == "hf_… and …"


class Slow:
    """Sends as slowly as its test wants."""

    def __init__(self) -> None:
        self.begun, self.free = threading.Event(), threading.Event()
        self.sent: list[str] = []

    def __call__(self, directory: Path, message: str) -> str:
        self.begun.set()
        assert self.free.wait(60)
        self.sent.append((directory / "model.safetensors").read_text())
        return "there"


def test_a_newer_one_takes_the_place_of_one_that_waits_and_checkpoints_may_go_meanwhile(tmp_path: Path) -> None:
    slow, told = Slow(), Told()
    uploads = Uploads(tmp_path, slow, told.events)
    for epoch in (1, 2, 3):
        path = checkpoint(tmp_path, epoch)
        uploads.offer(path)
        slow.begun.wait(60)
        for file in path.iterdir():
            file.unlink()
    slow.free.set()
    uploads.close(lambda: False)
    assert slow.sent == ["model.safetensors of 1", "model.safetensors of 3"]
    assert not list(tmp_path.glob("upload-*"))


def test_who_is_told_to_leave_waits_for_no_upload(tmp_path: Path) -> None:
    slow, told = Slow(), Told()
    uploads = Uploads(tmp_path, slow, told.events)
    uploads.offer(checkpoint(tmp_path))
    slow.begun.wait(60)
    thread = uploads._thread
    uploads.close(lambda: True)
    assert told.texts == ["epoch 12 was not uploaded; the checkpoint is on this computer"]
    slow.free.set()
    assert thread is not None and thread.daemon
    thread.join(60)
