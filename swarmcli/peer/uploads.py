"""The model of a checkpoint on the Hugging Face Hub, beside a run that never waits for that."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarmcli.checkpoints.layout import MANIFEST, OWNER, TRAINING, epoch_of
from swarmcli.errors import SwarmError
from swarmcli.events import Events, Noticed
from swarmcli.recipe import UploadSettings
from swarmcli.training import STREAM
from swarmcli.words import first_words

OF_TRAINING = (MANIFEST, TRAINING, OWNER, STREAM)  # of no use to users of the model
STAGED = "upload-"  # in the home: what is sent, under names that last as long as that takes

Send = Callable[[Path, str], str]  # a directory and what to say of it; where it is now


@dataclass(frozen=True, slots=True)
class Staged:
    epoch: int
    directory: Path
    message: str


class Uploads:
    """Sends the model of the newest checkpoint that it was given, in a thread of its own, until that has succeeded.

    A newer one takes the place of one that waits. A failure is told once and tried again, less and less often.
    """

    def __init__(self, home: Path, send: Send, events: Events, *, waits: tuple[float, float] = (10.0, 600.0)) -> None:
        """`waits`: seconds between the first two tries, and at most."""
        self._home, self._send, self._events, self._waits = home, send, events, waits
        self._condition = threading.Condition()
        self._waiting: Staged | None = None
        self._sending: Staged | None = None
        self._count = 0  # of what was given
        self._closing = False  # what fails now is not tried again
        self._told = ""
        for left in home.glob(f"{STAGED}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._thread = threading.Thread(target=self._work, name="swarm-uploads", daemon=True)
        self._thread.start()

    def offer(self, checkpoint: Path, loss: float | None = None) -> None:
        """To be called while the checkpoint is there; it may go at once afterwards. Raises nothing."""
        epoch = epoch_of(checkpoint)
        self._count += 1
        directory = self._home / f"{STAGED}{epoch:06d}-{self._count}"
        try:
            _stage(checkpoint, directory)
        except OSError as error:
            self._events.emit(Noticed("warning", f"epoch {epoch} is not uploaded: {error}"))
            return
        message = f"epoch {epoch}" + ("" if loss is None else f", evaluation loss {loss:.4f}")
        with self._condition:
            replaced, self._waiting = self._waiting, Staged(epoch, directory, message)
            self._condition.notify_all()
        if replaced is not None:
            shutil.rmtree(replaced.directory, ignore_errors=True)

    def close(self, stopped: Callable[[], bool]) -> None:
        """Lets what waits be tried once more, unless `stopped` says that the user does not wait for it."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        while self._thread.is_alive() and not stopped():
            self._thread.join(0.2)  # in pieces: a signal sets what `stopped` looks at
        left = self._sending or self._waiting
        if self._thread.is_alive() and left is not None:
            self._events.emit(Noticed("info", f"{left.message} was not uploaded; the checkpoint is on this computer"))

    def _work(self) -> None:
        first, longest = self._waits
        wait = first
        while (staged := self._next()) is not None:
            succeeded = self._try(staged)
            with self._condition:
                self._sending = None
                if not succeeded and not self._closing and self._waiting is None:
                    self._condition.wait(wait)
                    self._waiting = self._waiting or staged
                again = self._waiting is staged
            wait = first if succeeded else min(2 * wait, longest)
            if not again:
                shutil.rmtree(staged.directory, ignore_errors=True)

    def _next(self) -> Staged | None:
        """Waits for something to send; None when there will be no more."""
        with self._condition:
            while self._waiting is None and not self._closing:
                self._condition.wait()
            self._sending, self._waiting = self._waiting, None
            return self._sending

    def _try(self, staged: Staged) -> bool:
        try:
            place = self._send(staged.directory, staged.message)
        except Exception as error:  # of the library, of the network below it, and of the disk: many kinds
            if (told := first_words(error)) != self._told:
                self._told = told
                text = without_tokens(f"{staged.message} is not uploaded yet: {told}")
                self._events.emit(Noticed("warning", text))
            return False
        self._told = ""
        self._events.emit(Noticed("info", without_tokens(f"{staged.message} is at {place}")))
        return True


def _stage(checkpoint: Path, directory: Path) -> None:
    """The files of the model under further names, which outlive the checkpoint and take no room; copies where the file
    system has no such names."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for file in checkpoint.iterdir():
        if file.is_file() and file.name not in OF_TRAINING and not file.name.startswith("."):
            try:
                os.link(file, directory / file.name)
            except OSError:
                shutil.copyfile(file, directory / file.name)


def hub(settings: UploadSettings) -> Send:
    """Sends to the repository of a recipe, which is made if need be. The token is that of `hf auth login` or HF_TOKEN;
    huggingface_hub finds it, and nobody here looks at it."""

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
    """The words of a library, without what only its user may know."""
    secret = os.environ.get("HF_TOKEN", "")
    if len(secret) > 4:
        text = text.replace(secret, "…")
    return re.sub(r"hf_[A-Za-z0-9_]{4,}", "hf_…", text)
