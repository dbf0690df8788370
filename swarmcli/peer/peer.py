"""A member of a run, with which a role works: a home, a place in the network, a journal, and how it ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from swarmcli.dht import DHT
from swarmcli.errors import SwarmError
from swarmcli.events import Events
from swarmcli.journal import Journal
from swarmcli.network.identity import PeerID
from swarmcli.optim import Optimizer, PeerDescription
from swarmcli.optim.config import Role
from swarmcli.optim.peers.proof import Heard
from swarmcli.peer.activity import Activity
from swarmcli.peer.governor import Governor
from swarmcli.peer.home import Home
from swarmcli.peer.links import RunLinks
from swarmcli.peer.members import RunMembers
from swarmcli.peer.processors import ProcessorShare
from swarmcli.peer.summary import Summary
from swarmcli.recipe import Link, Recipe
from swarmcli.recipe.limit_store import LimitStore
from swarmcli.run.certificate import FILE, ContributionCertificate
from swarmcli.run.contributions import Attestation
from swarmcli.training.loop import ComputePace

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class RunPeer:
    """One process's membership of a run. `joining.join_run` makes it."""

    recipe: Recipe
    role: Role
    home: Home
    contacts: Sequence[str]  # first contacts, if it was told of any
    begins_anew: bool  # it begins the run from its first epoch if nobody who holds a later one can be reached
    fingerprint: Mapping[str, str]  # of the recipe
    digest: str  # of the recipe, as in links; "": the recipe cannot travel
    processors: ProcessorShare
    dht: DHT
    description: PeerDescription
    events: Events
    journal: Journal
    summary: Summary
    activity: Activity
    limits: LimitStore
    pace: ComputePace
    governor: Governor
    members: RunMembers
    links: RunLinks
    heard: Sequence[Heard | None] = ()  # how far the run is, as the first contacts have shown
    standing: Attestation | None = None  # this peer's contribution, signed by a monitor; known when it leaves
    saved: str = ""  # what became of this peer's state when it left, in words
    outcome: str = "done"  # how this peer's part in the run ended, for the journal

    @property
    def peer_id(self) -> PeerID:
        return self.dht.peer_id

    @property
    def no_link(self) -> str:
        """Why there is no link, in words."""
        return self.links.why_none

    def link(self) -> Link | None:
        """See RunLinks."""
        return self.links.link()

    @property
    def port(self) -> int:
        """The port on which this peer listens, whether others can dial it or not; 0: none."""
        return self.dht.endpoint.listen_port

    def stand(self, standing: Attestation) -> None:
        """Keeps in the home what a monitor has signed of this peer's contribution, for a certificate."""
        self.standing = standing
        with suppress(SwarmError):  # if the disk is full, only this file is lost
            ContributionCertificate.make(standing).write(self.home.path / FILE)

    def leave_summary(self, optimizer: Optimizer) -> None:
        """Writes down what this peer did and where it stands; if the disk is full, only the summary is lost."""
        summary = self.summary
        summary.epoch = optimizer.local_epoch
        summary.digest = "" if optimizer.auxiliary else optimizer.state_digest()
        if self.role == "trainer" and optimizer.use_gradient_averaging:
            summary.lost = optimizer.local_progress.samples_accumulated
        try:
            summary.write(self.home.summary)
        except OSError as error:
            logger.warning("%s was not written: %s", self.home.summary, error.strerror)
