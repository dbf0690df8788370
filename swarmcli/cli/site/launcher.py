"""`--nproc N`: torch's elastic launcher runs this command in N processes, and again when one of them dies.

Nothing here listens: the processes meet at a file in the site's home, which this process holds for as long as the site
lives, and talk to each other on the loopback interface.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

from swarmcli.cli.console import err
from swarmcli.cli.ending import HANGUP, ExitCode
from swarmcli.cli.processes import VARIABLE as PARENT
from swarmcli.cli.site.process import VARIABLE, WAITS, Launch
from swarmcli.errors import JournalError, SiteError
from swarmcli.journal import JOURNAL_NAME, JournalReader
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.peer.home import Home
from swarmcli.recipe import Recipe

MEETING = "meeting"  # a directory in the home, new for each life of the site
STARTS = 6  # a site may die so often in a row before an epoch counts samples of it
# Seconds for which the launcher waits for processes that it has asked to stop: the longest stay for the round that
# takes their samples, and two minutes to save.
STOPPING = 720


def start_site(recipe: Recipe, home: Path | None, processes: int, arguments: Sequence[str]) -> int:
    """Runs this very command, with these words after `swarm`, in so many processes on this machine; returns their exit
    code.

    Raises SiteError when the site dies again and again, and on Windows, whose processes cannot be asked to stop.
    """
    if sys.platform == "win32":
        raise SiteError(
            "--nproc (local.site.processes) asks processes to stop by signals, which Windows lacks; leave it out and "
            "start one trainer for each device, with local.device: cuda:0, cuda:1, ..."
        )

    def say(text: str) -> None:
        if err.is_terminal:
            # A process that was killed while it showed the run left the cursor invisible, at the end of a line.
            err.show_cursor(True)
            err.print()
        err.print(text, soft_wrap=True)

    with Home.at(home) if home else Home.claim(recipe.output_dir / recipe.run_id, "trainer") as held:
        # `swarm stop` waits for the launcher too, and `--now` ends it with its processes instead of having it start
        # others.
        entered = LocalPeers().entered(LocalPeer.here("site", recipe.run_id, held.path))
        try:
            with entered:
                given = partial(samples_in_journal, held.path, recipe.run_id)
                return run_site(held.path.absolute(), processes, ["-m", "swarmcli", *arguments], say, given)
        finally:
            shutil.rmtree(held.path / MEETING, ignore_errors=True)


def samples_in_journal(home: Path, run_id: str) -> int:
    """Returns how many samples of a home's peer epochs have counted, in all its lives."""
    with suppress(JournalError), JournalReader(home / JOURNAL_NAME) as journal:
        return journal.totals(run_id).own_samples
    return 0


def run_site(
    home: Path,
    processes: int,
    command: Sequence[str],
    say: Callable[[str], object],
    given: Callable[[], int] = int,
) -> int:
    """Runs `command`, words for Python, as the processes of one site until it has ended; `say` is told why it begins
    again, and `given` says how many samples it has given so far. For the main thread, where torch takes signals: the
    first is passed on to the processes, the second as SIGTERM, and the third ends this process, and they end with it.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").propagate = False  # its words on what is told below
    logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
    interrupted, deaths, life = False, 0, 0
    try:
        while True:
            before = given()
            try:
                launch(home, life, processes, command)
                return ExitCode.DONE
            except ChildFailedError as error:
                failures = error.failures
            codes = {rank: each.error_file_data.get("code", each.exitcode) for rank, each in failures.items()}
            told = {rank: str(each.message) for rank, each in failures.items() if "code" in each.error_file_data}
            for rank, code in codes.items():
                if code > 0 and code != ExitCode.START_AGAIN:  # it would end the same way again
                    if rank in told:
                        say(told[rank])
                    return int(code)
            rank, code = next(iter(codes.items()))  # the first that was seen; the others end because one has
            name = signal.Signals(-code).name if code < 0 else ""
            why = f"process {rank} of this site " + (f"was ended by {name}" if name else told.get(rank, "has given up"))
            why += " (perhaps there is too little memory)" if name == "SIGKILL" else ""
            life, deaths = life + 1, 1 if given() > before else deaths + 1
            if deaths >= STARTS:
                raise SiteError(
                    f"{why}; the site has ended {deaths} times and no epoch has counted samples of it in between, so "
                    "it is not started again; look at the lines above, or try fewer processes or a smaller "
                    "micro_batch_size"
                )
            say(f"{why}; the site starts again from its last state ({deaths} of {STARTS - 1})")
    except SignalException as error:  # between two lives, too: torch's handlers stay
        came: BaseException | None = error
        while isinstance(came, SignalException):  # one that came while the processes were ending hides the first
            interrupted |= came.sigval == signal.SIGINT
            came = came.__context__
        return ExitCode.INTERRUPTED if interrupted else ExitCode.DONE


def launch(home: Path, life: int, processes: int, command: Sequence[str]) -> None:
    """One life of the site. Raises ChildFailedError, SignalException."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    meeting = home / MEETING
    shutil.rmtree(meeting, ignore_errors=True)
    meeting.mkdir(mode=0o700)
    os.environ.update(environment(Launch(str(home), str(meeting / "processes"), life)))
    numbers = ["SIGTERM", "SIGINT"]
    if HANGUP is not None and signal.getsignal(HANGUP) is not signal.SIG_IGN:  # nohup ignores it, and means it
        numbers.append("SIGHUP")
    newer: dict[str, Any] = {"shutdown_timeout": STOPPING, "signals_to_handle": ",".join(numbers)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="site",
        rdzv_backend="c10d",
        rdzv_endpoint=str(meeting / "launcher"),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=0,  # of itself torch would start anew what can only end the same way
        logs_specs=DefaultLogsSpecs(str(meeting / "logs")),
        **{key: value for key, value in newer.items() if key in has_options(LaunchConfig)},
    )
    elastic_launch(config, sys.executable)(*command)


def has_options(config: Any) -> set[str]:
    return {each.name for each in fields(config)}


def environment(launch: Launch) -> dict[str, str]:
    """Returns what the processes inherit: the loopback interface for all that they say to each other, silence of
    libraries, a rendezvous without sockets, and with whom they end."""
    from torch.distributed.launcher.api import LaunchConfig

    loopback = loopback_interface()
    patient = {WAITS: str(STOPPING)} if "shutdown_timeout" in has_options(LaunchConfig) else {}
    return {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": f"={loopback}",  # "=": this very name, not all that begin with it
        PARENT: str(os.getpid()),
        VARIABLE: msgspec.json.encode(launch).decode(),
        **patient,
    }


def loopback_interface() -> str:
    """The name of the interface that has 127.0.0.1. Raises SiteError: there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    raise SiteError("no interface of this machine has the address 127.0.0.1, by which the processes of a site talk")
