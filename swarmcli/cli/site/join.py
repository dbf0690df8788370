"""`swarm join` in one process of a site: rank 0 is the peer, the others work for it and stay quiet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmcli.cli.console import setup_logging
from swarmcli.cli.session import Session
from swarmcli.cli.site.link import Network
from swarmcli.cli.site.process import SiteProcess
from swarmcli.errors import SiteError
from swarmcli.recipe import Recipe, load_recipe
from swarmcli.roles.site import form_site, run_site_leader, run_site_member
from swarmcli.sites.site import Site
from swarmcli.training import Compute


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """What the command line says, the same for all processes of a site."""

    recipe: Path
    settings: Sequence[str]
    contacts: Sequence[str]
    home: Path | None
    resume: str | None
    web: int | None
    web_host: str
    web_names: Sequence[str]
    verbose: bool


def join_as_process(process: SiteProcess, options: JoinOptions) -> None:
    """Trains as the process of a site that `process` is, until the site ends or breaks."""
    rank = process.rank
    setup_logging(options.verbose, who=f"process {rank.rank}" if rank.rank else "")
    if not options.verbose:
        # A broken site is told of once, by its launcher or as the error that ends this process.
        logging.getLogger("swarmcli.sites").setLevel(logging.CRITICAL)
        logging.getLogger("asyncio").addFilter(is_news)
    with process.running():
        recipe = load_recipe(options.recipe, [*options.settings, f"local.site.processes={rank.size}"])
        with form_site(recipe, rank.local_rank, process.store) as (site, compute):
            restarted = site.any(process.restarted)
            if site.rank == 0:
                _lead(process, options, recipe, site, compute, restarted)
            else:
                _follow(process, options, recipe, site, compute)


def is_news(record: logging.LogRecord) -> bool:
    """Whether a line of the event loop is about anything but a broken site, which its unfinished tasks end with."""
    return record.exc_info is None or not isinstance(record.exc_info[1], SiteError)


def _lead(
    process: SiteProcess, options: JoinOptions, recipe: Recipe, site: Site, compute: Compute, restarted: bool
) -> None:
    known = process.past.network
    contacts = [*(options.contacts or recipe.network.initial_peers), *known.contacts]
    with (
        Session(
            "trainer",
            recipe,
            contacts,
            options.home,
            port=known.port,  # others may have been told of it
            verbose=options.verbose,
            web_port=options.web,
            web_host=options.web_host,
            web_names=options.web_names,
            process=process,
        ) as session,  # fmt: skip
        process.telling(),
    ):
        peer, watch = session.peer, session.show()
        peer.summary.samples = process.past.samples

        def note(epoch: int) -> None:
            process.note_epoch(epoch, Network(peer.port, tuple(peer.acquaintances())), peer.summary.samples)

        run_site_leader(
            peer,
            watch,
            session.stop,
            site,
            compute,
            resume=options.resume,
            restarted=restarted,
            on_epoch=note,
        )


def _follow(process: SiteProcess, options: JoinOptions, recipe: Recipe, site: Site, compute: Compute) -> None:
    stop = threading.Event()
    with process.stopping(stop):
        run_site_member(recipe, site, compute, stop, home=options.home)
