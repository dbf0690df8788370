"""The running peers of one user on one computer: since when and where each runs, and how it is asked and controlled.

Each process writes only files of its own, whole or not at all, and names them by its process id and birth, which no
other process ever shares and no change of the clock alters; so nothing here needs a lock. Whoever looks removes the
files of processes that died. A file that is not this user's own regular file is not read.
"""

from __future__ import annotations

import getpass
import logging
import os
import re
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Annotated
from zlib import crc32

import msgspec
import psutil

from swarmcli.errors import ControlError

logger = logging.getLogger(__name__)

VARIABLE = "SWARM_RUNTIME_DIR"
OF_USERS = Path("/run/user")  # where Linux has a directory for each user who is logged in
MAX_BYTES = 1 << 16  # of a file
OURS = re.compile(r"(\d{1,10})-(\d{15,19})\.(?:json|token|writing|wishes)")  # also files of former versions
LOOPBACK = re.compile(r"http://127\.0\.0\.1:(\d{1,5})")  # no other computer, and no name that leads elsewhere


class LocalPeer(msgspec.Struct, frozen=True):
    """One process. The processes of a site have the same home, and one of them speaks for all."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    started: Annotated[float, msgspec.Meta(ge=0, lt=1e12)]  # seconds since 1970, for people
    role: str
    run_id: str
    home: str
    name: str = ""  # on the dashboard; "": it is still joining
    api: str = ""  # http://127.0.0.1:PORT; "": it cannot be asked (yet)
    born: Annotated[int, msgspec.Meta(ge=0)] = 0  # see `birth_of`

    @classmethod
    def here(cls, role: str, run_id: str, home: Path) -> LocalPeer:
        """This process."""
        pid = os.getpid()
        started = psutil.Process(pid).create_time()
        return cls(pid, started, role, run_id, str(home.absolute()), born=birth_of(pid))

    @property
    def lives(self) -> bool:
        return is_running(self.pid, self.born)

    @property
    def label(self) -> str:
        """Its name for a person: the peer's, or its home's."""
        return self.name or Path(self.home).name

    @property
    def port(self) -> int | None:
        """The port of its API; None: it has none, or names another computer."""
        found = LOOPBACK.fullmatch(self.api)
        return int(found[1]) if found and int(found[1]) < 1 << 16 else None

    @property
    def stem(self) -> str:
        """The name of its files, without a suffix."""
        return f"{self.pid}-{self.born}"


class LocalPeers:
    """The registry in one directory."""

    def __init__(self, directory: Path | None = None) -> None:
        """`directory`: None is the user's own, see `runtime_directory`. It is made when a peer is entered."""
        self.directory = directory or runtime_directory()

    @property
    def is_own(self) -> bool:
        """Whether the directory exists, and only this user can write into it."""
        return is_own_directory(self.directory)

    @contextmanager
    def entered(self, peer: LocalPeer) -> Iterator[RegistryEntry]:
        """Shows the peer to others while the block lasts. If that fails, a warning says so, and all else goes on."""
        entry = RegistryEntry(self, peer)
        try:
            entry.renew()
        except OSError as error:
            logger.warning("other peers of this machine do not see this one: %s", error)
        try:
            yield entry
        finally:
            for suffix in (".json", ".token", ".writing"):
                with suppress(OSError):  # Windows removes no file that somebody reads at this moment
                    self._file(peer, suffix).unlink(missing_ok=True)

    def living(self) -> list[LocalPeer]:
        """Returns the processes that run at this moment, the oldest first. Removes the files of others.

        Returns none if the directory is not this user's own: another owner could write anything there.
        """
        if not self.is_own:
            return []
        found = []
        for file in islice(self.directory.iterdir(), 4096):  # thousands of leftovers cost milliseconds
            named = OURS.fullmatch(file.name)
            if named is None:
                continue
            if not is_running(int(named[1]), int(named[2])):
                with suppress(OSError):
                    file.unlink(missing_ok=True)
            elif file.suffix == ".json" and (peer := _read(file)) is not None:
                found.append(peer)
        return sorted(found, key=lambda peer: (peer.born, peer.pid))

    def peers(self) -> list[LocalPeer]:
        """Returns the peers among them: one process for each home, the one that can be asked."""
        by_home: dict[str, LocalPeer] = {}
        for process in self.living():
            known = by_home.get(process.home)
            if known is None or (process.api and not known.api):
                by_home[process.home] = process
        return list(by_home.values())

    def token(self, peer: LocalPeer) -> str:
        """Returns the token that this peer's API asks for. Raises ControlError with the fix if there is none that can
        be trusted."""
        file = self._file(peer, ".token")
        try:
            return _read_own(file, private=True).decode("ascii").strip()
        except FileNotFoundError:
            raise ControlError(f"{peer.label} cannot be controlled: it left no token in {self.directory}") from None
        except (OSError, ValueError) as error:
            raise ControlError(
                f"{file} cannot be used as the token of {peer.label}: {error}; stop that process (id {peer.pid}) and "
                "start it again"
            ) from error

    def write(self, peer: LocalPeer, token: str) -> None:
        """Writes the peer's files, the token first, so that a reader that finds an API also finds the token. Raises
        OSError."""
        make_private(self.directory)
        if token:
            self._write(peer, ".token", token.encode("ascii"))
        self._write(peer, ".json", msgspec.json.encode(peer))

    def has(self, peer: LocalPeer, *, token: bool) -> bool:
        return self._file(peer, ".json").exists() and (not token or self._file(peer, ".token").exists())

    def _write(self, peer: LocalPeer, suffix: str, data: bytes) -> None:
        partial = self._file(peer, ".writing")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        partial.replace(self._file(peer, suffix))

    def _file(self, peer: LocalPeer, suffix: str) -> Path:
        return self.directory / f"{peer.stem}{suffix}"


class RegistryEntry:
    """This process's own files, by which others see it. Any thread may call it."""

    def __init__(self, registry: LocalPeers, peer: LocalPeer) -> None:
        self._registry = registry
        self._token = ""
        self._writing = threading.Lock()
        self._written = False  # whether the files are written as they are now
        self.peer = peer

    def renew(self) -> None:
        """Writes the files again if they are gone: temporary directories lose old files. Raises OSError."""
        with self._writing:
            if not (self._written and self._registry.has(self.peer, token=bool(self._token))):
                self._registry.write(self.peer, self._token)
                self._written = True

    def announce(self, *, name: str, api: str, token: str) -> None:
        """From now on anyone with the token can ask the peer there. Raises OSError; `renew` tries again."""
        with self._writing:
            self.peer, self._token = msgspec.structs.replace(self.peer, name=name[:200], api=api), token
            self._write()

    def _write(self) -> None:
        self._written = False
        self._registry.write(self.peer, self._token)
        self._written = True


def birth_of(pid: int) -> int:
    """Returns a number that a process keeps and that grows from one process to the next, even if the clock is set: on
    Linux, the ticks from the computer's start to the process's, below a mark of that start. On other systems it is the
    moment of the process's start by the clock of then: that stays too, but the clock may be set between two births.
    Raises psutil.Error."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
        mark = crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes()) & 0x7FFFF
    except (OSError, ValueError, IndexError):
        return int(psutil.Process(pid).create_time() * 1e6)
    return 1 << 62 | mark << 43 | ticks


def is_running(pid: int, born: int) -> bool:
    """Whether the process of this birth runs, and not a later one with its number. A zombie does not run."""
    try:
        return birth_of(pid) == born and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False


def runtime_directory() -> Path:
    """Returns where this user's peers find each other: $SWARM_RUNTIME_DIR, or below what the platform has for such
    files."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().resolve()
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "swarm"
    if not hasattr(os, "getuid"):
        return temporary_directory() / f"swarm-{getpass.getuser()}"
    # Programs that cron or sudo start lack XDG_RUNTIME_DIR, and should see the same peers.
    if is_own_directory(own := OF_USERS / str(os.getuid())):
        return own / "swarm"
    return temporary_directory() / f"swarm-{os.getuid()}"


def temporary_directory() -> Path:
    """Returns tempfile's directory. tempfile finds none while the disk is full: then where it usually is, for commands
    that only read."""
    with suppress(FileNotFoundError):
        return Path(tempfile.gettempdir())
    return Path(next(filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))), "/tmp"))


def make_private(directory: Path) -> None:
    """Makes a directory that only this user can use. Raises OSError if it is somebody else's."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "getuid"):  # Windows: it lies below the user's own directory
        return
    found = directory.lstat()
    # In a shared directory, anybody may have made this one before, or a link in its place.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{directory} is not this user's directory; set {VARIABLE} to another")
    directory.chmod(0o700)


def is_own_directory(directory: Path) -> bool:
    """Whether it exists, is no link, and only this user can write into it."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        return False
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


def _read(file: Path) -> LocalPeer | None:
    """Returns None for a file that was just removed, is of another version, or not what such a file should be."""
    try:
        peer = msgspec.json.decode(_read_own(file), type=LocalPeer)
    except (OSError, ValueError):
        return None
    return peer if peer.stem == file.stem else None


def _read_own(file: Path, *, private: bool = False) -> bytes:
    """Returns the bytes of a small regular file of this user's, which nobody else can write or (`private`) read. Raises
    OSError."""
    flags = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
    descriptor = os.open(file, os.O_RDONLY | flags)  # a link is refused, and a pipe does not hold this up
    with os.fdopen(descriptor, "rb") as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError("it is no regular file")
        if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & (0o077 if private else 0o022)):
            raise PermissionError("other users may write it" + (" or read it" if private else ""))
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise PermissionError(f"it has more than {MAX_BYTES} bytes")
    return data
