"""How a process of a site behaves towards whoever started it: it ends with its launcher, tells it a failure, and says
by its exit code whether starting anew makes sense."""

from __future__ import annotations

import math
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import typer

from swarmcli.cli.ending import ExitCode, exit_code, stop_on_signals, words
from swarmcli.cli.processes import ends_with_parent
from swarmcli.cli.site.link import Failed, LauncherLink, Past
from swarmcli.errors import BootstrapError, SiteError, SwarmError
from swarmcli.peer.activity import STAYS

MAX_WORDS = 10_000  # characters that are told of a failure


@dataclass(frozen=True, slots=True)
class WorldRank:
    """Which process of a site this is, as the launcher that started it says: torch's, or `swarm` by itself."""

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

    def __init__(self, rank: WorldRank, link: LauncherLink | None) -> None:
        self.rank = rank
        self._link = link  # None under the volunteer's own torchrun
        self._told: Failed | None = None

    @classmethod
    def of_environment(cls) -> SiteProcess | None:
        """Returns this process's place in a launcher's site; None: it belongs to no site.

        Call it before what takes time: from then on the process ends with its launcher.
        """
        rank = world_rank_of_process()
        return cls(rank, LauncherLink.found()) if rank is not None else None

    @property
    def past(self) -> Past:
        """The record that earlier lives of the site have left."""
        return self._link.past if self._link else Past()

    @property
    def store(self) -> Path | None:
        """The file at which the processes of this machine meet; None: torchrun has a store."""
        return Path(self._link.start.store) if self._link else None

    @property
    def patience(self) -> float:
        """For how many seconds, at most, the site may hand in after a signal."""
        return math.inf if self._link else STAYS.hasty

    @property
    def restarted(self) -> bool:
        """Whether this process knows that the site has lived before, and may have left a state to go on from. The
        agents of torchrun on several machines count for themselves, so one process may know it and another not."""
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" or self.past.epoch > 0

    def note_epoch(self, epoch: int, contacts: tuple[str, ...], samples: int) -> None:
        """Tells the launcher that this life of the site was of use, and the next life whom it knew and what all of
        them have contributed."""
        self._note(msgspec.structs.replace(self.past, epoch=epoch, contacts=contacts, samples=samples))

    def note_home(self, home: Path) -> None:
        self._note(msgspec.structs.replace(self.past, home=str(home.absolute())))

    def _note(self, past: Past) -> None:
        if self._link is not None:
            self._link.tell(past)

    @contextmanager
    def stopping(self, ask: Callable[[signal.Signals, bool], object]) -> Iterator[None]:
        """Within this block `ask` hears of the wish to leave, and to hurry: the launcher's, as with `stop_on_signals`;
        under torchrun that of its signals."""
        if self._link is None:
            with stop_on_signals(ask):
                yield
            return
        self._link.on_stop(ask)
        try:
            yield
        finally:
            self._link.on_stop(lambda number, again: None)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Whatever goes wrong inside of it is told to the launcher, and ends in an exit code."""
        if self._link is None:
            with ends_with_parent():
                yield
            return
        try:
            yield
        except typer.Exit:
            raise
        except Exception as error:
            raise typer.Exit(self._tell(error).code) from None
        finally:
            self._link.close()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """The launcher hears of an error inside of it at once, before this process has left the swarm, say: the others
        notice that it is gone, and what they know is less."""
        try:
            yield
        except typer.Exit:
            raise
        except Exception as error:
            if self._link is not None:
                self._tell(error)
            raise

    def _tell(self, error: Exception) -> Failed:
        assert self._link is not None
        if self._told is None:
            if isinstance(error, BootstrapError) and self.past.contacts:
                # Those whom the life before knew may be gone; the next one begins without.
                self._note(msgspec.structs.replace(self.past, contacts=()))
                self._told = Failed(ExitCode.START_AGAIN)
            else:
                self._told = self._failure(error)
            self._link.tell(self._told)
        return self._told

    def _failure(self, error: Exception) -> Failed:
        if isinstance(error, SiteError):  # somebody else has failed, or is silent; the launcher sees who
            return Failed(ExitCode.START_AGAIN)
        if isinstance(error, SwarmError):
            return Failed(exit_code(error), f"swarm: {words(error)}"[:MAX_WORDS])
        trace = "".join(traceback.format_exception(error))[-MAX_WORDS:]
        return Failed(
            ExitCode.START_AGAIN,
            f"{trace}swarm: this is a fault in swarm itself, in process {self.rank.rank} of the site; please report "
            "it with the lines above",
        )
