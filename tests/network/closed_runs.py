"""A closed run for tests: its key, invitations, and memberships whose clock is turned by hand."""

from __future__ import annotations

import contextlib

from swarmcli.dht import DHTNode
from swarmcli.errors import NetworkError
from swarmcli.events import Event
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.membership import Membership, Pass, Remembered, claimed
from swarmcli.owner.revocations import Revocations
from swarmcli.recipe.run_key import RunKey
from swarmcli.testing import MemoryNetwork

RECIPE = "a" * 32
NOON, TONIGHT = 1_000_000, 1_040_000  # seconds


class TurnedClock:
    def __init__(self) -> None:
        self.time = float(NOON)

    def __call__(self) -> float:
        return self.time


class ClosedRunWorld:
    """One closed run, whose members are named by the seeds of their keys."""

    def __init__(self, recipe: str = RECIPE) -> None:
        self.key = RunKey(Identity.from_seed(b"owner").private_key)
        self.recipe = recipe
        self.run = self.key.run(recipe)
        self.clock = TurnedClock()

    def membership(self, identity: Identity, card: Pass | None = None, **remembered: object) -> Membership:
        known = Remembered(card=card, **remembered)  # type: ignore[arg-type]
        return Membership(self.run, identity, known, self.clock)

    def member(self, seed: int, until: int = TONIGHT) -> Membership:
        """One with an invitation for its own peer id."""
        identity = Identity.from_seed(seed)
        return self.membership(identity, self.key.invite(self.recipe, identity.peer_id, until))

    def bearers(self, host: PeerID, *seeds: int, until: int = TONIGHT) -> list[Membership]:
        """Peers that have the same link for the bearer."""
        invitation, key = self.key.invite_bearer(self.recipe, host, until)
        identities = [Identity.from_seed(seed) for seed in seeds]
        return [self.membership(each, claimed(self.run, invitation, key, each.peer_id)) for each in identities]


def meet(dialer: Membership, listener: Membership) -> None:
    """What the two show each other in a greeting. Raises NotAMember at whichever end refuses."""
    own, other = dialer._identity.peer_id, listener._identity.peer_id
    binding = listener.check(own, dialer.proof(other))
    dialer.welcomed(other, listener.proof(own), binding)


class ClosedSwarm:
    """Members on one memory network, each with a node and what follows revocations. An async context manager."""

    def __init__(self, world: ClosedRunWorld, network: MemoryNetwork | None = None) -> None:
        self.world = world
        self.network = network or MemoryNetwork(seed=1)
        self.nodes: list[DHTNode] = []
        self.revocations: list[Revocations] = []
        self.heard: list[Event] = []
        self._ends = contextlib.AsyncExitStack()

    async def add(self, membership: Membership) -> DHTNode:
        """Adds a member whose first contact is the first member."""
        transport = self.network.transport(membership._identity)
        endpoint = Endpoint(transport, seed=len(self.nodes), membership=membership)
        endpoint.events.subscribe(self.heard.append)
        await endpoint.start()
        contacts = self.nodes[0].endpoint.addresses if self.nodes else ()
        self._ends.push_async_callback(endpoint.close)
        node = await DHTNode.create(endpoint, initial_peers=contacts)
        self._ends.push_async_callback(node.shutdown)
        revocations = Revocations(endpoint, membership)
        revocations.start()
        self._ends.push_async_callback(revocations.close)
        self.nodes.append(node)
        self.revocations.append(revocations)
        return node

    async def connect_all(self) -> None:
        """Connects all pairs of which neither end refuses."""
        for node in self.nodes:
            for other in self.nodes:
                if other is not node:
                    with contextlib.suppress(NetworkError):
                        await node.endpoint.connect(other.endpoint.addresses[0], timeout=5)

    async def __aenter__(self) -> ClosedSwarm:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ends.aclose()
