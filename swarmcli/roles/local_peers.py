"""The living peers of this user on this machine, each in a small file of its own: who runs, since when, and where.

A process writes its own file and no other, whole or not at all, and names it by its id and start, which no other
process ever shares; so nothing here needs a lock. The file of a process that died is removed by whoever reads it next.
"""

from __future__ import annotations

import getpass
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from swarmcli.optim.config import Role

logger = logging.getLogger(__name__)

VARIABLE = "SWARM_RUNTIME_DIR"
MAX_BYTES = 1 << 16
# Seconds. The start of a process is told from the clock, which may be set meanwhile; a process id comes back later.
SAME_START = 60.0


class LocalPeer(msgspec.Struct, frozen=True):
    """One process. Those of a site have the same home."""

    pid: int
    started: float  # seconds since 1970
    role: Role
    run_id: str
    home: str

    @classmethod
    def here(cls, role: Role, run_id: str, home: Path) -> LocalPeer:
        """This process."""
        return cls(os.getpid(), psutil.Process().create_time(), role, run_id, str(home))

    @property
    def lives(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < SAME_START
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True


class LocalPeers:
    """The registry in one directory."""

    def __init__(self, directory: Path | None = None) -> None:
        """`directory`: None is the user's own, see `runtime_directory`. It is made when a peer is entered."""
        self.directory = directory or runtime_directory()

    @contextmanager
    def entered(self, peer: LocalPeer) -> Iterator[None]:
        """Shows the peer to others while the block lasts. Where that fails it is said, and all else goes on."""
        try:
            self.enter(peer)
        except OSError as error:
            logger.warning("other peers of this machine do not see this one: %s", error)
        try:
            yield
        finally:
            self._file(peer).unlink(missing_ok=True)

    def enter(self, peer: LocalPeer) -> None:
        """Writes the peer's file, if it is not there. Raises OSError."""
        file = self._file(peer)
        if file.exists():
            return
        make_private(self.directory)
        partial = file.with_suffix(".writing")
        partial.write_bytes(msgspec.json.encode(peer))
        partial.replace(file)

    def living(self) -> list[LocalPeer]:
        """Those that run at this moment, the oldest first."""
        found = []
        for file in self.directory.glob("*.json"):
            try:
                peer = msgspec.json.decode(file.read_bytes()[:MAX_BYTES], type=LocalPeer)
            except (OSError, msgspec.MsgspecError):  # just removed, or of another version
                continue
            if peer.lives:
                found.append(peer)
            else:
                file.unlink(missing_ok=True)
        return sorted(found, key=lambda peer: (peer.started, peer.pid))

    def _file(self, peer: LocalPeer) -> Path:
        return self.directory / f"{peer.pid}-{int(peer.started)}.json"


def runtime_directory() -> Path:
    """Where this user's peers find each other: $SWARM_RUNTIME_DIR, or below what the platform has for such files."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().resolve()
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "swarm"
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    return Path(tempfile.gettempdir()) / f"swarm-{user}"


def make_private(directory: Path) -> None:
    """Makes a directory that this user alone can use. Raises OSError if it is somebody else's."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "getuid"):  # Windows, where it lies below the user's own directory
        return
    found = directory.lstat()
    # In a directory for all, anybody may have made this one before, or a link in its place.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{directory} is not this user's directory; set {VARIABLE} to another")
    directory.chmod(0o700)
