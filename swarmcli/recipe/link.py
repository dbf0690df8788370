"""The link by which a stranger joins a run:

    swarm://<peer id>@host:port[,host:port…]/<run id>/fingerprint=<32 characters>[/peer=<peer id>@host:port…][/invite=…]

It names one to four peers of the run, where each can be dialed, and what their recipe must hash to. No character of it
means anything to bash, zsh, fish or cmd, so it needs no quotes there: IPv6 stands without brackets, and what follows
the last colon is the port. Homes of former versions hold links with `?` and `&` in place of the later slashes.

A link is text that somebody was sent: it is bounded and read strictly, and all that swarm does with it is to dial these
peers. A link with an invitation names one peer: the host, which alone may bind the invitation to a newcomer. It is a
secret until somebody has used it. Parameters that this version does not know are refused: joining may need them, and
the run's refusal later would be harder to understand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from swarmcli.errors import AddressError
from swarmcli.network.addresses import Scope, parse_address, scope_of
from swarmcli.network.identity import PeerID
from swarmcli.recipe.fingerprint import DIGEST_LENGTH
from swarmcli.recipe.schema import RUN_ID
from swarmcli.recipe.ticket import Ticket

SCHEME = "swarm://"
FINGERPRINT = "fingerprint"
PEER = "peer"
INVITE = "invite"

_EXPECTED = "copy all of the link: swarm://<peer id>@host:port/<run id>/fingerprint=…"
_DIGEST = re.compile(rf"[a-z2-7]{{{DIGEST_LENGTH}}}")


# A QR code is read from across a room if it is small, so a peer writes fewer places into a link than it reads.
MOST_CHARACTERS = 2048  # with all places and the longest run id a link has about 900, and QR codes end at 2,953
MOST_PEERS = 4
MOST_PLACES = 8  # host:port pairs of one peer that are read, as many as a peer may announce
OWN_PLACES = 4  # places that a peer writes into its own link …
OTHER_PLACES = 2  # … and those of each further peer in it


@dataclass(frozen=True, slots=True)
class Link:
    """Peers of a run and what they must serve. `places` are `host:port`; the one that most others can dial comes
    first."""

    peer_id: PeerID
    places: tuple[str, ...]
    run_id: str
    fingerprint: str  # `digest_of` the recipe
    ticket: Ticket | None = None  # to a closed run
    others: tuple[tuple[PeerID, tuple[str, ...]], ...] = ()  # further peers with their places; none beside a ticket

    @property
    def each(self) -> tuple[Link, ...]:
        """A link for each of the peers alone."""
        return replace(self, others=()), *(
            replace(self, peer_id=p, places=where, others=()) for p, where in self.others
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """The places as addresses of these very peers, as `--peer` takes them."""
        return tuple(f"tcp://{place}/{link.peer_id.text}" for link in self.each for place in link.places)

    @property
    def named(self) -> str:
        """The peers, for people."""
        return " or ".join(each.peer_id.short for each in self.each)

    def __str__(self) -> str:
        """The text that `parse_link` reads."""
        peers = ((self.peer_id, self.places), *self.others)
        named, *others = (re.sub(r"[][]", "", f"{peer.text}@{','.join(places)}") for peer, places in peers)
        parameters = [(FINGERPRINT, self.fingerprint), *([(PEER, ",".join(others))] if others else [])]
        if self.ticket is not None:
            parameters.append((INVITE, self.ticket.encode()))
        return "/".join((SCHEME + named, self.run_id, *map("=".join, parameters)))


def command_of(link: Link) -> str:
    """Returns the command that a stranger types. PowerShell needs the double quotes: it would split the link at a
    comma."""
    return f'swarm join "{link}"'


def reach_in_words(link: Link) -> str:
    """Says for whom a link is of no use; "" if everyone can use it."""
    match scope_of_places(link.places):
        case Scope.HOST:
            return "This link works on this machine only: no other address is known at which this peer can be dialed."
        case Scope.LAN:
            return "This link works within this network only."
        case _:
            return ""


def scope_of_places(places: Iterable[str]) -> Scope:
    """Returns from how far the place can be dialed that most can dial."""
    return max((_scope(parse_address(f"tcp://{place}").host) for place in places), default=Scope.HOST)


def places_of(addresses: Iterable[str]) -> tuple[str, ...]:
    """Chooses the places for a link from a peer's addresses: those that most others can dial come first; those that
    only this machine can dial are taken only where there are no others."""
    found = [parse_address(address) for address in addresses]
    dialed = sorted((each for each in found if each.scheme == "tcp"), key=lambda each: -_scope(each.host))
    widest = max((_scope(each.host) for each in dialed), default=Scope.HOST)
    kept = [each for each in dialed if widest == Scope.HOST or _scope(each.host) > Scope.HOST]
    texts = [str(replace(each, peer_id=None)).partition("://")[2] for each in kept]
    return tuple(dict.fromkeys(texts))[:OWN_PLACES]


def _scope(host: str) -> Scope:
    """A host name with dots counts as public: somebody chose it for others. A name without dots belongs to one
    network."""
    named = Scope.HOST if host == "localhost" else Scope.INTERNET if "." in host else Scope.LAN
    return named if (scope := scope_of(host)) is None else scope


def is_link(text: str) -> bool:
    """Whether a text is meant to be a link, and not the path of a recipe."""
    return _bare(text[:64]).lower().startswith(SCHEME)


def parse_link(text: str) -> Link:
    """Reads a link, also one with blanks or quotes around it. Raises AddressError that says what is wrong with it."""
    text = _bare(text)
    if len(text) > MOST_CHARACTERS:
        raise AddressError(f"a link has at most {MOST_CHARACTERS} characters, this one has {len(text)}; {_EXPECTED}")
    if not (text.isascii() and text.isprintable()):
        raise AddressError(f"the link holds characters that no link has: {_shown(text)}; copy it again")
    if not text[: len(SCHEME)].lower() == SCHEME:
        raise AddressError(f"{_shown(text)} is no link; {_EXPECTED}")
    peer_text, at, rest = text[len(SCHEME) :].partition("@")
    if not at:
        raise AddressError(f"the link names no peer before an @; {_EXPECTED}")
    places, slash, rest = rest.partition("/")
    run_id, *parameters = re.split(r"[?&/]", rest)
    if not slash or not RUN_ID.fullmatch(run_id):
        raise AddressError(f"the link names no run after its addresses: {_shown(run_id)}; {_EXPECTED}")
    peer_id = PeerID.parse(peer_text)
    fingerprint, ticket, named = _parameters(parameters)
    others = tuple(map(_other, named))
    if len({peer_id, *(peer for peer, _ in others)}) <= len(others):
        raise AddressError("the link names a peer twice; copy the link again, or ask for another one")
    return Link(peer_id, _places(places), run_id, fingerprint, ticket, others)


def _bare(text: str) -> str:
    """Returns a text without what mail, chats and shells that know no single quotes leave around a link."""
    return text.strip().strip("'\"<>`“”„‘’").strip()


def _places(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(re.sub(r"^([^][]*:[^][]*):", r"[\1]:", place) for place in text.split(",")))
    if len(found) > MOST_PLACES:
        raise AddressError(f"a link has at most {MOST_PLACES} addresses, this one has {len(found)}")
    for place in found:
        if "%" in place:
            raise AddressError(f"{_shown(place)} is an address of one machine's own interface; nobody else can dial it")
        parse_address(f"tcp://{place}")
    return found


def _other(text: str) -> tuple[PeerID, tuple[str, ...]]:
    """A further peer: `<peer id>@host:port…`."""
    peer, _, places = text.partition("@")
    try:
        return PeerID.parse(peer), _places(places)
    except AddressError as error:
        raise AddressError(f"{error}; copy all of the link") from None


def _parameters(texts: Iterable[str]) -> tuple[str, Ticket | None, list[str]]:
    """Returns the fingerprint, the invitation, and the texts of further peers, unread."""
    parameters = [(name, value) for name, _, value in (text.partition("=") for text in texts)]
    for name, _ in parameters:
        if name not in (FINGERPRINT, INVITE, PEER):
            if any(known.startswith(name) for known in (FINGERPRINT, INVITE, PEER)):
                raise AddressError(f"the link is cut off at {_shown(name)}; copy all of the link")
            raise AddressError(
                f"the link has a parameter {_shown(name)} that this version of swarm does not know; install a newer "
                "one, or ask for a link without it"
            )
    invites = {value for name, value in parameters if name == INVITE}
    if len(invites) > 1:
        raise AddressError("a link carries one invitation; copy the link again")
    peers = [peer for name, value in parameters if name == PEER for peer in re.split(r",(?=[^,]*@)", value)]
    if len(peers) >= MOST_PEERS:
        raise AddressError(f"a link names at most {MOST_PEERS} peers, this one {len(peers) + 1}")
    if peers and invites:
        raise AddressError(
            "a link with an invitation names one peer, to which the invitation is shown; ask the owner of the run for "
            "another link"
        )
    values = {value for name, value in parameters if name == FINGERPRINT}
    if not values:
        raise AddressError("the link lacks its fingerprint, by which the recipe is checked; copy all of the link")
    if len(values) > 1 or not _DIGEST.fullmatch(value := values.pop()):
        raise AddressError(
            f"the fingerprint of a link has {DIGEST_LENGTH} characters of a–z and 2–7, and comes once; copy the "
            "link again"
        )
    return value, Ticket.parse(invites.pop()) if invites else None, peers


def _shown(text: str) -> str:
    return ascii(text[:80])
