"""`swarm join` in one process of a site: rank 0 is the peer, the others work for it and stay quiet."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarmcli.cli.console import setup_logging
from swarmcli.cli.ending import stop_on_signals
from swarmcli.cli.site.process import SiteProcess
from swarmcli.errors import SiteError
from swarmcli.peer.site import form_site, run_site_leader, run_site_member
from swarmcli.recipe import Recipe
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
    with (
        options.session("trainer", recipe, contacts, process=process) as session,
        process.telling(),
    ):
        run_site_leader(
            session.peer,
            session.watch,
            session.stop,
            site,
            compute,
            resume=options.begins_from,
            restarted=restarted,
        )


def _follow(process: SiteProcess, options: PagedOptions, recipe: Recipe, site: Site, compute: Compute) -> None:
    stop = threading.Event()

    def ask(number: signal.Signals, hurry: bool) -> None:
        # Otherwise rank 0 lets this process go once it has handed in what all have computed. What torchrun's signal
        # says, rank 0 may have to hear from here: it may be on another machine.
        if hurry or process.home is None:
            stop.set()

    with stop_on_signals(ask):
        run_site_member(recipe, site, compute, stop, home=process.home or options.home)
