"""`swarm join` in one process of a site: rank 0 is the peer, the others work for it and stay quiet."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from coordinator_web.background import listen
from swarmcli.cli.console import setup_logging
from swarmcli.cli.site.process import SiteProcess
from swarmcli.errors import ListenError, SiteError
from swarmcli.recipe import Recipe
from swarmcli.peer.site import form_site, run_site_leader, run_site_member
from swarmcli.sites.site import Site
from swarmcli.training import Compute

if TYPE_CHECKING:
    from swarmcli.cli.peers import JoinOptions, PagedOptions


def join_as_process(process: SiteProcess, options: JoinOptions) -> None:
    """Trains as the process of a site that `process` is, until the site ends or breaks."""
    rank = process.rank
    setup_logging(options.verbose, who=f"process {rank.rank}" if rank.rank else "")
    if not options.verbose:
        # A broken site is told of once, by its launcher or as the error that ends this process.
        logging.getLogger("swarmcli.sites").setLevel(logging.CRITICAL)
        logging.getLogger("asyncio").addFilter(is_news)
    with process.running():
        named = options.agreed("trainer", options.nproc, f"local.site.processes={rank.size}")
        with form_site(named.recipe, rank.local_rank, process.store) as (site, compute):
            restarted = site.any(process.restarted)
            if site.rank == 0:
                contacts = [*options.peer, *named.contacts]
                _lead(process, options, named.recipe, contacts, site, compute, restarted)
            else:
                _follow(process, options, named.recipe, site, compute)


def is_news(record: logging.LogRecord) -> bool:
    """Whether a line of the event loop is about anything but a broken site, which its unfinished tasks end with."""
    return record.exc_info is None or not isinstance(record.exc_info[1], SiteError)


def _lead(
    process: SiteProcess,
    options: PagedOptions,
    recipe: Recipe,
    contacts: Sequence[str],
    site: Site,
    compute: Compute,
    restarted: bool,
) -> None:
    contacts = [*(contacts or recipe.network.initial_peers), *process.past.contacts]
    if restarted and recipe.local.port:  # another port will not do: others were told of this one by hand
        await_port(recipe.local.host or "", recipe.local.port)
    with (
        options.session("trainer", recipe, contacts, process=process) as session,
        process.telling(),
    ):
        peer, watch = session.peer, session.show()
        peer.summary.samples = process.past.samples

        def note(epoch: int) -> None:
            process.note_epoch(epoch, tuple(peer.acquaintances()), peer.summary.samples)

        run_site_leader(
            peer,
            watch,
            session.stop,
            site,
            compute,
            resume=options.begins_from,
            restarted=restarted,
            on_epoch=note,
        )


def await_port(host: str, port: int, *, sleep: Callable[[float], object] = time.sleep) -> None:
    """Returns when one can listen there, or after half a minute: then whoever listens tells what is in the way. The
    site that lived before may not be gone for the system yet, or a connection may have been given its port
    meanwhile."""
    for _ in range(60):
        try:
            listen(host, port).close()
        except ListenError:
            sleep(0.5)
        else:
            return


def _follow(process: SiteProcess, options: PagedOptions, recipe: Recipe, site: Site, compute: Compute) -> None:
    stop = threading.Event()

    def ask(number: signal.Signals, hurry: bool) -> None:
        # Otherwise rank 0 lets this process go once it has handed in what all have computed. What torchrun's signal
        # says, rank 0 may have to hear from here: it may be on another machine.
        if hurry or process.patience < math.inf:
            stop.set()

    with process.stopping(ask):
        run_site_member(recipe, site, compute, stop, home=options.home)
