"""The directory of one peer on this machine: identity, journal, checkpoints, summary.

Several peers may run on one machine from one recipe. Each takes the first home that no other process holds:
`<output_dir>/<run_id>/trainer-1`, `trainer-2`, … A home that was used before is taken up again, with its identity.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import BaseFileLock, FileLock, Timeout

from swarmcli.errors import AddressError, SwarmError
from swarmcli.files.durable import foreign, write_file
from swarmcli.machine.registry import LocalPeer
from swarmcli.network.addresses import parse_address

if TYPE_CHECKING:
    from swarmcli.recipe import Link

CONTACTS = "contacts.json"  # a file in a home: peers that are tried beside the first contacts
PORT = "port"  # the port on which this peer last listened
BEGAN = "began"  # if the run began from another run's checkpoint: which, in words
ENDS = "ends"  # after which epoch the evaluator has ended the run, and of which recipe that is (its digest)
LINK = "link"  # the last link that this peer gave out, and on the next line what else joining takes


class Home:
    """A claimed directory. The claim lasts until `release` or the end of the process, however it ends."""

    def __init__(self, path: Path, claim: BaseFileLock | None) -> None:
        """`claim`: None if the process that started this one holds it."""
        self.path = path
        self._claim = claim

    identity = property(lambda self: self.path / "identity.key")
    journal = property(lambda self: self.path / "journal.sqlite")
    summary = property(lambda self: self.path / "summary.json")

    @classmethod
    def claim(cls, output_dir: Path, role: str, most: int = 1000) -> Home:
        """Takes the first free home of this role below `output_dir`, which is made if need be."""
        for number in range(1, most + 1):
            home = cls._try(output_dir / f"{role}-{number}")
            if home is not None:
                return home
        raise SwarmError(f"{output_dir}: all of {role}-1 to {role}-{most} are in use by other processes")

    @classmethod
    def at(cls, path: Path) -> Home:
        """Takes exactly this directory. Raises SwarmError if another process holds it."""
        home = cls._try(path)
        if home is None:
            raise SwarmError(f"{path} is in use by another process; give another --home or stop that one")
        return home

    @classmethod
    def _try(cls, path: Path) -> Home | None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            claim = FileLock(path / "in-use", timeout=0, thread_local=False)
            claim.acquire()
        except Timeout:
            return None
        except OSError as error:
            fix = (
                foreign(path / "in-use", path)
                or foreign(path)
                or "name another: --home, output_dir, or SWARM_DATA_DIR for links"
            )
            raise SwarmError(f"{path} cannot be used as a peer's directory: {error.strerror}; {fix}") from error
        return cls(path, claim)

    def dashboard_token(self) -> str:
        """Returns the token that a browser needs to see the peer's dashboard from elsewhere. It is drawn once, so that
        a link to the page holds over restarts; only this user can read it."""
        file = self.path / "dashboard.token"
        with suppress(OSError, ValueError):
            if re.fullmatch(r"[\w-]{22,}", kept := file.read_text(encoding="ascii").strip()):  # 128 bits
                return kept
        token = secrets.token_urlsafe(16)
        with suppress(OSError):  # with a full disk, the link is another one next time
            write_file(file, token.encode(), private=True)
        return token

    def forget_word(self) -> None:
        """Removes the file by which scripts on this machine find the peer that lives here."""
        (self.path / "peer.json").unlink(missing_ok=True)

    def leave(self, name: str, text: str) -> None:
        """Writes a file for the next process in this home. If the disk is full, only this file is lost."""
        with suppress(OSError):
            write_file(self.path / name, text.encode())

    def port_before(self) -> int:
        """Returns the port on which the peer of this home last listened; 0: not known."""
        try:
            port = int((self.path / PORT).read_text())
        except (OSError, ValueError):
            return 0
        return port if 0 < port < 65536 else 0

    def release(self) -> None:
        """Gives the home back. Idempotent."""
        if self._claim is not None:
            self._claim.release()

    def __enter__(self) -> Home:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def addresses_in(file: Path, key: str = "") -> list[str]:
    """Returns the TCP addresses that a peer has left in a file of its home, in all of it or below a key."""
    try:
        found = json.loads(file.read_text())
        parsed = [parse_address(each) for each in (found[key] if key else found)]
    except (OSError, ValueError, TypeError, KeyError, AddressError):
        return []
    return [str(each) for each in parsed if each.scheme == "tcp"]


def running_beside(me: LocalPeer, living: Callable[[], Sequence[LocalPeer]], seconds: float = 60.0) -> list[str]:
    """Returns where peers of a run listen that this user started before this one, in homes beside its home.

    It waits at most `seconds` for peers that are not ready yet. Only peers that began before this one count, so if two
    begin together, one waits for the other.
    """
    deadline, own = time.monotonic() + seconds, Path(me.home)
    while True:
        beside = [peer for peer in living() if peer.run_id == me.run_id and Path(peer.home).parent == own.parent]
        older = [each for each in beside if each.home != me.home and (each.born, each.pid) < (me.born, me.pid)]
        told = [address for peer in older for address in addresses_in(Path(peer.home, "peer.json"), "addresses")]
        found = [address for address in told if _listens(address)]
        # A home may hold the file of a process that was killed, so what counts is whether somebody listens there.
        if found or all(Path(peer.home, "peer.json").exists() for peer in older) or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _listens(address: str) -> bool:
    """Whether somebody listens there, seen from this network namespace: containers may share directories but not the
    network."""
    where = parse_address(address)
    try:
        with closing(socket.create_connection((where.host, where.port), timeout=2.0)):
            return True
    except OSError:
        return False


def remembered(home: Path) -> list[str]:
    """Returns addresses of the peers that the peer of a home knew when it last left."""
    return addresses_in(home / CONTACTS)


def read_link(home: Path) -> tuple[Link, str]:
    """Returns the last link that the peer of a home gave out, and what else joining takes; "": nothing.

    Raises OSError and AddressError.
    """
    from swarmcli.recipe.link import parse_link

    text, _, access = (home / LINK).read_text(encoding="utf-8").partition("\n")
    return parse_link(text), access.strip()
