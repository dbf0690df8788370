"""Uploads the models of checkpoints to the Hugging Face Hub, beside a run that never waits for that."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from swarmcli.checkpoints.layout import MANIFEST, OWNER, TRAINING, epoch_of
from swarmcli.errors import SwarmError
from swarmcli.events import Events, Noticed
from swarmcli.recipe import UploadSettings
from swarmcli.training import STREAM
from swarmcli.words import first_words

OF_TRAINING = (MANIFEST, TRAINING, OWNER, STREAM)  # of no use to users of the model
STAGED = "upload-"  # directories in the home with the files that are being sent, until they are sent

Send = Callable[[Path, str], str]  # (directory, commit message) → where the model is now


class Uploads:
    """Sends the models of checkpoints, one at a time, in a daemon thread, so that a peer that leaves does not wait for
    it.

    A newer model replaces one that waits. If one fails, a warning says so, and the next checkpoint is tried again.
    """

    def __init__(self, home: Path, send: Send, events: Events) -> None:
        self._home, self._send, self._events = home, send, events
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiting: tuple[Path, str] | None = None  # what is sent next, and its commit message
        self._sending = ""
        for left in home.glob(f"{STAGED}*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)

    def offer(self, checkpoint: Path, loss: float | None = None) -> None:
        """To be called while the checkpoint is there; it may be removed right afterwards. Raises nothing."""
        epoch = epoch_of(checkpoint)
        message = f"epoch {epoch}" + ("" if loss is None else f", evaluation loss {loss:.4f}")
        try:
            directory = Path(mkdtemp(prefix=STAGED, dir=self._home))
            _stage(checkpoint, directory)
        except OSError as error:
            self._events.emit(Noticed("warning", f"epoch {epoch} is not uploaded: {error}"))
            return
        with self._lock:
            replaced, self._waiting = self._waiting, (directory, message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="swarm-uploads", daemon=True)
                self._thread.start()
        if replaced is not None:
            shutil.rmtree(replaced[0], ignore_errors=True)

    def close(self, stopped: Callable[[], bool]) -> None:
        """Waits for what was offered, unless `stopped` says that the user does not."""
        while (thread := self._thread) is not None and not stopped():
            thread.join(0.2)  # waits in pieces: a signal changes what `stopped` returns
        if self._thread is not None:
            text = f"{self._sending} was not uploaded; the checkpoint is on this computer"
            self._events.emit(Noticed("info", text))

    def _work(self) -> None:
        while (staged := self._next()) is not None:
            directory, message = staged
            try:
                told = Noticed("info", without_tokens(f"{message} is at {self._send(directory, message)}"))
            except Exception as error:  # from the library, the network below it, and the disk: many kinds
                told = Noticed("warning", without_tokens(f"{message} is not uploaded: {first_words(error)}"))
            shutil.rmtree(directory, ignore_errors=True)
            self._events.emit(told)

    def _next(self) -> tuple[Path, str] | None:
        with self._lock:
            staged, self._waiting = self._waiting, None
            if staged is None:
                self._thread = None
            else:
                self._sending = staged[1]
            return staged


def _stage(checkpoint: Path, directory: Path) -> None:
    """Gives the model's files further names (hard links), which outlive the checkpoint and take no room; copies them
    where the file system has no hard links."""
    for file in checkpoint.iterdir():
        if file.is_file() and file.name not in OF_TRAINING and not file.name.startswith("."):
            try:
                os.link(file, directory / file.name)
            except OSError:
                shutil.copyfile(file, directory / file.name)


def hub(settings: UploadSettings) -> Send:
    """Returns a function that sends to the recipe's repository, which is made if need be. The token is that of `hf auth
    login` or HF_TOKEN; huggingface_hub finds it, and nothing here reads it."""

    def send(directory: Path, message: str) -> str:
        try:
            from huggingface_hub import HfApi
            from huggingface_hub.utils import disable_progress_bars
        except ImportError as error:
            raise SwarmError("uploads need the library huggingface_hub; pip install 'swarmcli[hub]'") from error
        disable_progress_bars()
        api, repo = HfApi(library_name="swarm"), settings.repo
        assert repo is not None
        url = api.create_repo(repo, private=settings.private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=str(directory), commit_message=message)
        return str(url)

    return send


def without_tokens(text: str) -> str:
    """Returns a library's words without tokens, which only its user may know."""
    secret = os.environ.get("HF_TOKEN", "")
    if len(secret) > 4:
        text = text.replace(secret, "…")
    return re.sub(r"hf_[A-Za-z0-9_]{4,}", "hf_…", text)
