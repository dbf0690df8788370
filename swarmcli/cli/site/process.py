"""How a process of a site behaves towards torch's launcher that started it: it ends with it, tells it a failure, and
says by its exit code whether starting anew makes sense."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import typer

from swarmcli.cli.ending import ExitCode, exit_code, words
from swarmcli.cli.processes import end_with_parent
from swarmcli.errors import BootstrapError, ListenError, SiteError, SwarmError
from swarmcli.files.durable import write_file

VARIABLE = "SWARM_SITE"  # in the environment of a process that `swarm --nproc` has launched: its Launch, as JSON
WAITS = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torch's variable: seconds until a launcher kills whom it has asked to stop
SAVES = 20.0  # seconds of these that a process keeps for its goodbye and its last state
MAX_WORDS = 10_000  # characters that are told of a failure


class Launch(msgspec.Struct, frozen=True):
    """`swarm --nproc` says this to the processes that it launches."""

    home: str  # of the site; the launcher holds it
    store: str  # the file at which the processes of this life meet
    life: int  # how often the site has been started again


@dataclass(frozen=True, slots=True)
class WorldRank:
    """Which process of a site this is, as torch's launcher says."""

    rank: int
    size: int
    local_rank: int  # among the processes of this machine


def world_rank_of_process(environment: Mapping[str, str] | None = None) -> WorldRank | None:
    """Reads the environment; None for a process that is no part of a site. Raises SiteError for half of it."""
    given = os.environ if environment is None else environment
    if "RANK" not in given or given.get("WORLD_SIZE", "1") == "1":
        return None
    try:
        return WorldRank(int(given["RANK"]), int(given["WORLD_SIZE"]), int(given.get("LOCAL_RANK", "0")))
    except ValueError:
        raise SiteError(
            f"RANK={given['RANK']!r} and WORLD_SIZE={given['WORLD_SIZE']!r} in the environment are no numbers; "
            "start this with torchrun, or unset them"
        ) from None


class SiteProcess:
    """This process as one of a site. Use `running` around all that it does."""

    def __init__(self, rank: WorldRank, launch: Launch | None) -> None:
        """`launch`: None under the volunteer's own torchrun."""
        self.rank = rank
        self._launch = launch
        self._told = False
        self.home = Path(launch.home) if launch else None  # held by the launcher, or to be claimed
        self.store = Path(launch.store) if launch else None  # None: torchrun has a store

    @classmethod
    def of_environment(cls) -> SiteProcess | None:
        """Returns this process's place in a launcher's site; None: it belongs to no site."""
        rank = world_rank_of_process()
        if rank is None:
            return None
        given = os.environ.get(VARIABLE)
        return cls(rank, msgspec.json.decode(given, type=Launch) if given else None)

    @property
    def patience(self) -> float:
        """For how many seconds, at most, the site may hand in after a signal: its launcher kills it later."""
        waits = os.environ.get(WAITS, "")
        return max(0.0, (float(waits) if waits.isdecimal() else 30.0) - SAVES)

    @property
    def restarted(self) -> bool:
        """Whether this process knows that the site has lived before, and may have left a state to go on from. The
        agents of torchrun on several machines count for themselves, so one process may know it and another not."""
        return bool(self._launch and self._launch.life) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Whatever goes wrong inside of it is told to the launcher, and ends in an exit code."""
        if self._launch is None:
            end_with_parent(os.getppid())  # a parent that passed no Launch
            yield
            return
        try:
            with self.telling():
                yield
        except typer.Exit:
            raise
        except Exception as error:
            raise typer.Exit(self._judge(error)[0]) from None

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Writes an error inside of it at once where torch's launcher looks for it, and not after this process has left
        the swarm: the others notice that it is gone, and what they know is less."""
        try:
            yield
        except typer.Exit:
            raise
        except Exception as error:
            code, said = self._judge(error)
            if not self._told and self._launch and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
                self._told = True
                found = {"message": said[-MAX_WORDS:], "timestamp": int(time.time()), "code": code}
                with suppress(OSError):
                    write_file(Path(file), json.dumps(found).encode())
            raise

    def _judge(self, error: Exception) -> tuple[ExitCode, str]:
        if isinstance(error, SiteError):  # another process has failed, or is silent
            return ExitCode.START_AGAIN, f"has given up: {error}"
        if self.restarted and isinstance(error, BootstrapError | ListenError):
            # The contacts may be back in a moment, and the port that others were told of may be free.
            return ExitCode.START_AGAIN, f"has given up: {words(error)}"
        if isinstance(error, SwarmError):
            return exit_code(error), f"swarm: {words(error)}"
        return ExitCode.START_AGAIN, (
            f"has given up:\n{''.join(traceback.format_exception(error))}swarm: this is a fault in swarm itself, in "
            f"process {self.rank.rank} of the site; please report it with the lines above"
        )
