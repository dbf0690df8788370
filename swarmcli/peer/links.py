"""The link by which others join through one peer: to whom it leads, and where it is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from swarmcli.dht import DHT
from swarmcli.errors import RecipeError
from swarmcli.files.durable import write_file
from swarmcli.network.addresses import is_direct
from swarmcli.network.identity import PeerID
from swarmcli.optim import PeerReport
from swarmcli.optim.config import Role
from swarmcli.peer.home import LINK, Home
from swarmcli.peer.members import RunMembers
from swarmcli.peer.summary import Summary
from swarmcli.recipe import Link, Recipe, digest_of, offered
from swarmcli.recipe.link import MOST_PEERS, OTHER_PLACES, places_of, scope_of_places
from swarmcli.recipe.offered import needs_in_words, offered_contents, offered_files


@dataclass(frozen=True)
class RecipeOffer:
    """A recipe as links hand it out."""

    text: str = ""  # "": the recipe cannot travel
    digest: str = ""  # the recipe's hash, as in links; "" likewise
    contents: str = ""  # see `offered_contents`
    files: Mapping[str, Path] = field(default_factory=dict)
    why_not: str = ""  # why the recipe cannot travel; "": it can

    @classmethod
    def of(cls, recipe: Recipe) -> RecipeOffer:
        try:
            text, digest = offered(recipe), digest_of(recipe)
            return cls(text, digest, offered_contents(recipe), offered_files(recipe))
        except RecipeError as error:
            return cls(why_not=str(error))


class RunLinks:
    """One peer's links."""

    def __init__(
        self,
        recipe: Recipe,
        role: Role,
        home: Home,
        dht: DHT,
        offer: RecipeOffer,
        summary: Summary,
        members: RunMembers,
    ) -> None:
        self.recipe, self._role, self._home = recipe, role, home
        self._dht, self._offer, self._summary, self._members = dht, offer, summary, members
        self.welcomed: Mapping[PeerID, tuple[str, ...]] = {}  # contacts in this run, and where they were dialed
        self._told: Link | None = None  # the link that was told last
        self.why_none = offer.why_not or (
            "This peer has no link: nobody can dial it, and it knows no peer of the run that others could dial."
        )

    def link(self) -> Link | None:
        """Returns the link by which most others can join: it names the peers that most others can dial, perhaps without
        this one, first those that stay longest. None: see `why_none`. Any thread may call it; the link may change from
        call to call."""
        if not (self._offer.text and self._dht.is_alive()):
            return None
        stays_less = partial(self._stays_less, self._members.others())
        named = self._named_by_links(stays_less)
        found = {peer: places for peer, addresses in named if (places := places_of(addresses))}
        widest = max(map(scope_of_places, found.values()), default=None)
        most = [peer for peer, places in found.items() if scope_of_places(places) == widest][:MOST_PEERS]
        if not most:
            return None
        # In a closed run the first peer binds invitations, so what others say of themselves must not decide which that
        # is.
        first, *others = most if self.recipe.access == "invite" else sorted(most, key=stays_less)
        further = tuple((peer, found[peer][:OTHER_PLACES]) for peer in others)
        return Link(first, found[first], self.recipe.run_id, self._offer.digest, others=further)

    def _named_by_links(self, stays_less: Callable[[PeerID], Any]) -> Iterator[tuple[PeerID, Sequence[str]]]:
        """Yields this peer, the contacts that took it in, and others of the run that this peer has dialed itself: a
        link sends nobody to an address by hearsay. What others say of themselves orders only these others, so it drives
        out neither this peer nor a contact that its user has named."""
        endpoint = self._dht.endpoint
        yield self._dht.peer_id, endpoint.direct_addresses
        for contact, addresses in self.welcomed.items():
            if endpoint.is_connected(contact):
                yield contact, addresses
        others = sorted(self._members.others().keys() - self.welcomed.keys(), key=stays_less)
        for peer in others[:64]:
            seen = endpoint.seen(peer)
            if seen is not None and not (seen.relayed or seen.punched):
                yield peer, [address for address in endpoint.first_hand(peer) if is_direct(address)]

    def _stays_less(self, others: Mapping[PeerID, PeerReport], peer: PeerID) -> tuple[bool, float, bool, PeerID]:
        """A key to sort by: monitors and auxiliaries first, then the trainers that have computed most; this peer before
        its equals."""
        report = others.get(peer)
        role = self._role if peer == self._dht.peer_id else report.role if report else "trainer"
        samples = self._summary.samples if peer == self._dht.peer_id else report.samples if report else 0
        return role == "trainer", -samples if role == "trainer" else 0.0, peer != self._dht.peer_id, peer

    def has_another_link(self) -> bool:
        """Whether the link has changed since `tell`: who can be dialed is found out while a peer runs."""
        return self.link() != self._told

    def tell(self, dashboard: str = "") -> bool:
        """Writes into the home, while this peer lives, how it can be reached: for scripts on this machine. The link
        stays in the home, unless it leads nowhere any more. Returns whether people should hear of the new link, since
        the old one leads nowhere, or is for others."""
        addresses, link, before = self._dht.get_visible_addresses(), self.link(), self._told
        told = {"peer": self._dht.peer_id.text, "addresses": addresses, "dashboard": dashboard, "link": str(link or "")}
        if link:
            write_file(self._home.path / LINK, f"{link}\n{needs_in_words(self.recipe)}\n".encode())
        else:
            (self._home.path / LINK).unlink(missing_ok=True)
        write_file(self._home.path / "peer.json", json.dumps(told).encode())  # written last: a script waits for it
        self._told = link
        if link is None or before is None:
            return link is not before
        leads_on = set(before.addresses) & set(link.addresses)
        return not leads_on or scope_of_places(before.places) != scope_of_places(link.places)
