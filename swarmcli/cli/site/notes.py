"""What the launcher of a site and its processes on this machine tell each other: small files in one directory.

The launcher makes the directory and removes it; processes find it through the environment. A process that is killed
at any moment leaves nothing half: files appear whole, or mean something by being there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

VARIABLE = "SWARM_SITE_NOTES"


class Network(msgspec.Struct, frozen=True):
    """The peer's place among others."""

    port: int = 0  # on which it listened; 0: not yet, or not at all
    contacts: tuple[str, ...] = ()


class Notes:
    """The notes of one site on this machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def found(cls) -> Notes | None:
        """Those of the launcher that started this process; None: it was not `swarm` that did."""
        place = os.environ.get(VARIABLE)
        return cls(Path(place)) if place else None

    def begin(self) -> None:
        """The processes are about to be started, perhaps again."""
        for file in (self.directory / "told", *self.directory.glob("broken.*")):
            file.unlink(missing_ok=True)

    # from the processes

    @property
    def epoch(self) -> int:
        """The last that the site has ended; 0 before the first."""
        return int(self._read("epoch") or 0)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._write("epoch", str(epoch))

    @property
    def home(self) -> Path | None:
        """The peer's directory, which it takes up again when the site is started anew."""
        text = self._read("home")
        return Path(text) if text else None

    @home.setter
    def home(self, home: Path) -> None:
        self._write("home", str(home))

    @property
    def network(self) -> Network:
        """Where the peer was to be found in its life before, and whom it knew."""
        text = self._read("network")
        return msgspec.json.decode(text, type=Network) if text else Network()

    @network.setter
    def network(self, network: Network) -> None:
        self._write("network", msgspec.json.encode(network).decode())

    def first_to_tell(self) -> bool:
        """Whether no other process tells its failure in this life of the site: one of them is enough to read."""
        try:
            (self.directory / "told").touch(exist_ok=False)
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    @property
    def told(self) -> bool:
        """Whether a process tells a failure, or is about to."""
        return (self.directory / "told").exists()

    @property
    def broken(self) -> set[int]:
        """The processes, by id, that have found that the site cannot go on, and end."""
        return {int(file.suffix[1:]) for file in self.directory.glob("broken.*")}

    def break_up(self) -> None:
        with suppress(FileNotFoundError):  # with the launcher the directory has gone, and whoever would read this
            (self.directory / f"broken.{os.getpid()}").touch()

    # from the launcher

    @property
    def launcher(self) -> int | None:
        """The process that all of them end with."""
        text = self._read("launcher")
        return int(text) if text else None

    @launcher.setter
    def launcher(self, pid: int) -> None:
        self._write("launcher", str(pid))

    @property
    def stop(self) -> int | None:
        """The signal with which the launcher was asked to stop."""
        text = self._read("stop")
        return int(text) if text else None

    @stop.setter
    def stop(self, number: int) -> None:
        self._write("stop", str(number))

    def _read(self, name: str) -> str:
        try:
            return (self.directory / name).read_text()
        except FileNotFoundError:
            return ""

    def _write(self, name: str, text: str) -> None:
        partial = self.directory / f"{name}.{os.getpid()}"
        with suppress(FileNotFoundError):  # as in `break_up`
            partial.write_text(text)
            partial.replace(self.directory / name)
