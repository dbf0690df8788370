"""Peers of one machine share its processors: each takes so many threads that together they have one per core.

Teams of threads that do not fit onto the cores wait for each other at the end of every operation. Two trainers with two
threads each on two cores took five times as long for a step as with one thread each.

The living peers of a user know each other by small files: who runs, since when, and where. A process writes its own
file and no other, whole or not at all, and names it by its id and start, which no other process ever shares; so nothing
here needs a lock. The file of a process that died is removed by whoever reads it next."""

from __future__ import annotations

import getpass
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import torch

from swarmcli.optim.config import Role
from swarmcli.recipe import Recipe
from swarmcli.threads import count_threads_by

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


LOOK_SECONDS = 1.0  # between two looks at who is there; one takes about 0.1 ms for each peer


class ProcessorShare:
    """How many threads are this process's share, as long as other peers of this machine come and go.

    All threads that torch would take are divided by the trainers; what is left over goes to the oldest of them. A
    monitor, which computes now and then, takes as many as one trainer more would get.
    """

    def __init__(self, peers: LocalPeers, me: LocalPeer, threads: int, *, shared: bool = True) -> None:
        """`threads`: how many there are for all; with `shared` false, for this process, whoever else is there."""
        self._peers = peers
        self._me = me
        self._all = self._count = threads
        self._shared = shared
        self._looked = -LOOK_SECONDS

    def count(self) -> int:
        """From any thread."""
        now = time.monotonic()
        if self._shared and now >= self._looked + LOOK_SECONDS:
            self._looked = now
            self._count = self._share()
        return self._count

    def _share(self) -> int:
        try:
            self._peers.enter(self._me)  # again, if the file is gone: old files of temporary directories are removed
            trainers = [peer for peer in self._peers.living() if peer.role == "trainer"]
        except OSError:
            return self._count
        others = [peer for peer in trainers if peer.pid != self._me.pid]
        place = trainers.index(self._me) if self._me in trainers else len(others)
        each, rest = divmod(self._all, len(others) + 1)
        return max(1, each + (place < rest))

    def take(self, *ignored: object) -> None:
        """Gives this thread, between two steps, as many threads for its arithmetic as its share is now."""
        if torch.get_num_threads() != (count := self.count()):
            torch.set_num_threads(count)


@contextmanager
def sharing_processors(recipe: Recipe, role: Role, home: Path) -> Iterator[ProcessorShare]:
    """Shows this process to the other peers of the machine while the block lasts, and gives its share.

    `local.threads` and OMP_NUM_THREADS are a person's own choice: then nothing is divided here.
    """
    peers, me = LocalPeers(), LocalPeer.here(role, recipe.run_id, home)
    shared = recipe.local.threads is None and "OMP_NUM_THREADS" not in os.environ
    share = ProcessorShare(peers, me, recipe.local.threads or torch.get_num_threads(), shared=shared)
    with peers.entered(me), count_threads_by(share.count):
        yield share
