"""The directory of one peer on this machine: identity, journal, checkpoints, summary.

Several peers may run on one machine from one recipe. Each takes the first home that no other process holds:
`<output_dir>/<run_id>/trainer-1`, `trainer-2`, … A home that was used before is taken up again, with its identity.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from filelock import BaseFileLock, FileLock, Timeout

from swarmcli.errors import SwarmError

MAX_HOMES = 1000
TOKEN_CHARACTERS = 22  # 128 bits


class Home:
    """A claimed directory. The claim lasts until `release` or the end of the process, however that ends."""

    def __init__(self, path: Path, claim: BaseFileLock, *, new: bool = False) -> None:
        """`new`: this claim made the directory."""
        self.path = path
        self._claim = claim
        self._new = new

    identity = property(lambda self: self.path / "identity.key")
    journal = property(lambda self: self.path / "journal.sqlite")
    summary = property(lambda self: self.path / "summary.json")

    @classmethod
    def claim(cls, output_dir: Path, role: str) -> Home:
        """Takes the first free home of this role below `output_dir`, which is made if need be."""
        for number in range(1, MAX_HOMES + 1):
            home = cls._try(output_dir / f"{role}-{number}")
            if home is not None:
                return home
        raise SwarmError(f"{output_dir}: all of {role}-1 to {role}-{MAX_HOMES} are in use by other processes")

    @classmethod
    def at(cls, path: Path) -> Home:
        """Takes exactly this directory; an error if another process holds it."""
        home = cls._try(path)
        if home is None:
            raise SwarmError(f"{path} is in use by another process; give another --home or stop that one")
        return home

    @classmethod
    def _try(cls, path: Path) -> Home | None:
        try:
            new = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            claim = FileLock(path / "in-use", timeout=0, thread_local=False)
            claim.acquire()
        except Timeout:
            return None
        except OSError as error:
            raise SwarmError(f"{path} cannot be used as a peer's directory: {error.strerror}") from error
        return cls(path, claim, new=new)

    def dashboard_token(self) -> str:
        """What a browser has to bring to look at this peer's dashboard from elsewhere: drawn once, so that a link to it
        holds over restarts, and readable by this user alone."""
        file = self.path / "dashboard.token"
        with suppress(OSError, ValueError):
            if len(kept := file.read_text(encoding="ascii").strip()) >= TOKEN_CHARACTERS:
                return kept
        token = secrets.token_urlsafe(16)
        with suppress(OSError):  # a full disk costs no more than another link next time
            file.unlink(missing_ok=True)
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as stream:
                stream.write(token)
        return token

    def discard(self) -> None:
        """Removes a directory that this claim made: the peer never came into the run, so nothing in it is of worth.
        A home that was there before stays as it is."""
        if self._new:
            shutil.rmtree(self.path, ignore_errors=True)

    def release(self) -> None:
        """Gives the home back. Idempotent."""
        self._claim.release()

    def __enter__(self) -> Home:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
