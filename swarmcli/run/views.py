"""Makes what a page shows from what is known: plain functions of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from swarmcli.events import ActivityStatus, Contribution, Evaluated, RoundFinished
from swarmcli.run.values import STATES, Counts, PeerPage, PeerStatus, Rounds, RunStatus

ROLES = ("trainer", "auxiliary", "monitor")
GONE = ("left", "lost")

SORTED_BY: Mapping[str, Callable[[PeerStatus], Any]] = {
    "name": lambda peer: (peer.name or peer.peer_id).casefold(),
    "role": lambda peer: peer.role,
    "epoch": lambda peer: peer.epoch,
    "rate": lambda peer: peer.samples_per_second,
    "share": lambda peer: peer.share,
    "loss": lambda peer: peer.loss,
    "drift": lambda peer: peer.drift,
    "last_seen": lambda peer: peer.last_seen,
    "health": lambda peer: peer.health,
}


def listing_order(peer: PeerStatus) -> tuple[bool, int, str, str]:
    """Puts this peer first, the others by role and name: an order that stays while peers train."""
    rank = ROLES.index(peer.role) if peer.role in ROLES else len(ROLES)
    return (not peer.me, rank, peer.name or "\uffff", peer.peer_id)


def page_of(peers: Sequence[PeerStatus], offset: int, limit: int, sort: str, query: str) -> PeerPage:
    """`sort`: a key of SORTED_BY, with a minus before it the greatest first; "": this peer first, then by role and
    name. Peers whose value is unknown come last either way. `query` is looked for in names, ids, roles, devices and
    health, whatever its case."""
    wanted = query.casefold().strip()
    found = [peer for peer in peers if wanted in _searched(peer)] if wanted else list(peers)
    if sort:
        key = SORTED_BY[sort.removeprefix("-")]
        unknown = [peer for peer in found if key(peer) is None]
        found = sorted((peer for peer in found if key(peer) is not None), key=key, reverse=sort.startswith("-"))
        found += unknown
    return PeerPage(total=len(found), rows=tuple(found[offset : offset + limit]))


def _searched(peer: PeerStatus) -> str:
    return "\n".join((peer.name, peer.peer_id, peer.role, peer.device, peer.health)).casefold()


def count(peers: Iterable[PeerStatus]) -> Counts:
    by_role: Counter[str] = Counter()
    by_health: Counter[str] = Counter()
    for peer in peers:
        by_health[peer.health] += 1
        if peer.health not in (*GONE, "not answering"):
            by_role[peer.role] += 1
    return Counts(
        alive=by_role.total(),
        trainers=by_role["trainer"],
        auxiliaries=by_role["auxiliary"],
        monitors=by_role["monitor"],
        paused=by_health["paused"],
        following=by_health["line too slow"],
    )


def sentence(status: RunStatus, activity: ActivityStatus, rate: float) -> str:
    """Says to its user what the shown peer does. `rate`: the peer's own, in samples a second."""
    if activity.state != "running":
        return activity.sentence[:1].upper() + activity.sentence[1:]
    if status.state not in ("training", "averaging"):
        told = status.download if status.state == "synchronizing" else ""
        words = told or STATES[status.state].words
        words += ": your samples cannot count" if status.state == "following" else ""
        return words[:1].upper() + words[1:] + ("" if status.state == "synchronizing" else f", {status.where}")
    match status.role:
        case "trainer":
            # As format.js shows a rate: the card below this sentence has the same number.
            speed = f"{rate:,.0f}" if rate >= 10 or rate == 0 else f"{rate:.1f}"
            return f"Training at {speed} samples a second, {status.where}"
        case "auxiliary":
            return f"Helping the others to average, {status.where}"
        case _:
            return f"Following the run, {status.where}"


def evaluated(evaluation: Evaluated, best: Evaluated | None) -> str:
    """How good the model is, for people: "epoch 40: loss 2.3100, by Monica; best 2.2900 at epoch 30"."""
    words = ", ".join(filter(None, [f"epoch {evaluation.epoch:,}: {evaluation.sentence}", evaluation.by]))
    if best is None or best.loss >= evaluation.loss:
        return words
    return f"{words}; best {best.loss:.4f} at epoch {best.epoch:,}"


def place_among(contributions: Iterable[Contribution], peer: str) -> tuple[int | None, int]:
    """Returns the place of a peer by samples, from 1 (equals share one; None: it gave none), and how many peers gave
    some."""
    given = {each.peer: each.samples for each in contributions if each.samples > 0}
    own = given.get(peer)
    return (None if own is None else 1 + sum(samples > own for samples in given.values())), len(given)


def page_of_rounds(rounds: Sequence[RoundFinished], names: Mapping[str, str]) -> Rounds:
    """`names`: those of all peers that are known."""
    named = {peer for each in rounds for peer in (each.leader, *each.members, *each.left_out)}
    return Rounds(rows=tuple(rounds), names={peer: names[peer] for peer in sorted(named) if names.get(peer)})
