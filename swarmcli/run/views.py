"""Makes what a page shows of what is known: plain functions of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from swarmcli.events import Contribution, Evaluated, RoundFinished
from swarmcli.run.values import (
    ActivityShown,
    Counts,
    PeerPage,
    PeerRound,
    PeerStatus,
    RoundRow,
    Rounds,
    RunStatus,
    Straggler,
    shown_as,
)
from swarmcli.words import roughly

ROLES = ("trainer", "auxiliary", "monitor")
GONE = ("left", "lost")
MOST_NAMED = 32  # peers of each kind in a round

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
    """This one first, then by role and name: an order that stays as it is while peers train."""
    rank = ROLES.index(peer.role) if peer.role in ROLES else len(ROLES)
    return (not peer.me, rank, peer.name or "\uffff", peer.peer_id)


def page_of(peers: Sequence[PeerStatus], offset: int, limit: int, sort: str, query: str) -> PeerPage:
    """`sort`: a key of SORTED_BY, with a minus before it the greatest first; "": this peer first, then by role and
    name. Peers of whom that is unknown come last either way. `query` is looked for in names, ids, roles, devices and
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
    troubled = 0
    for peer in peers:
        by_health[peer.health] += 1
        if peer.health not in (*GONE, "not answering"):
            by_role[peer.role] += 1
            troubled += bool(peer.trouble)
    return Counts(
        alive=by_role.total(),
        trainers=by_role["trainer"],
        auxiliaries=by_role["auxiliary"],
        monitors=by_role["monitor"],
        paused=by_health["paused"],
        following=by_health["follows"],
        behind=by_health["behind"],
        troubled=troubled,
        silent=by_health["not answering"],
        gone=by_health["left"] + by_health["lost"],
    )


def sentence(status: RunStatus, activity: ActivityShown, rate: float) -> str:
    """Says to its user what the shown peer does. `rate`: its own, samples a second."""
    if activity.state != "running":
        why = " and ".join(reason.text for reason in activity.reasons)
        left = activity.seconds_left
        return {
            "pausing": f"Pausing: {why or 'by you'}, once what is computed is handed in"
            + (f", in about {roughly(left)}" if left else ""),
            "paused": f"Paused: {why or 'by you'}",
            "stopping": activity.sentence.capitalize() or "Leaving",
        }[activity.state]
    where = f"epoch {status.epoch:,}" + (f" of {status.max_epochs:,}" if status.max_epochs is not None else "")
    match status.state:
        case "waiting":
            return "Waiting for somebody to train with" if status.role == "trainer" else "Waiting for trainers"
        case "synchronizing":
            return status.download[:1].upper() + status.download[1:] or "Looking where the run is"
        case "following":
            return f"Computing nothing: your samples cannot count at present, {where}"
        case "standing":
            return f"Waiting: the run stands, {where}"
        case "stranded":
            return "Waiting: nobody whom it can reach holds the model"
        case "finished":
            return f"Finished: the run has reached its last epoch, {status.epoch:,}"
    match status.role:
        case "trainer":
            # As format.js shows a rate: the card below this sentence has the same number.
            speed = f"{rate:,.0f}" if rate >= 10 or rate == 0 else f"{rate:.1f}"
            return f"Training at {speed} samples a second, {where}"
        case "auxiliary":
            return f"Helping the others to average, {where}"
        case _:
            return f"Following the run, {where}"


def evaluated(evaluation: Evaluated, best: Evaluated | None) -> str:
    """How good the model is, for people: "epoch 40: loss 2.3100, by Monica; best 2.2900 at epoch 30"."""
    words = ", ".join(filter(None, [f"epoch {evaluation.epoch:,}: {evaluation.sentence}", evaluation.by]))
    if best is None or best.loss >= evaluation.loss:
        return words
    return f"{words}; best {best.loss:.4f} at epoch {best.epoch:,}"


def rank(contributions: Iterable[Contribution], peer: str) -> tuple[int | None, int]:
    """The place of a peer by samples, from 1 (equals share one; None: it gave none), and of how many."""
    given = {each.peer: each.samples for each in contributions if each.samples > 0}
    own = given.get(peer)
    return (None if own is None else 1 + sum(samples > own for samples in given.values())), len(given)


def round_row(each: RoundFinished) -> RoundRow:
    return shown_as(
        RoundRow,
        each,
        members=each.members[:MOST_NAMED],
        contributors=each.contributors[:MOST_NAMED],
        left_out=dict(list(each.left_out.items())[:MOST_NAMED]),
        members_total=len(each.members),
        contributors_total=len(each.contributors),
        left_out_total=len(each.left_out),
        took=each.duration,
    )


def page_of_rounds(rounds: Sequence[RoundFinished], names: Mapping[str, str]) -> Rounds:
    """`names`: of all peers that are known."""
    rows = tuple(map(round_row, rounds))
    named = {peer for row in rows for peer in (row.leader, *row.members, *row.contributors, *row.left_out)}
    return Rounds(
        rows=rows,
        stragglers=stragglers(rounds, names),
        names={peer: names[peer] for peer in sorted(named) if names.get(peer)},
    )


def stragglers(rounds: Sequence[RoundFinished], names: Mapping[str, str]) -> tuple[Straggler, ...]:
    """Returns the peers that were left out of these rounds (oldest first), the most often left out first."""
    members: Counter[str] = Counter()
    left: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for each in rounds:
        members.update({*each.members, *each.left_out})
        left.update(each.left_out.keys())
        reasons |= each.left_out
    return tuple(
        Straggler(peer=peer, name=names.get(peer, ""), rounds=members[peer], left_out=times, reason=reasons[peer])
        for peer, times in left.most_common(10)
    )


def as_member(each: RoundFinished, peer: str) -> PeerRound:
    """A round as it went for one of its members."""
    out = each.left_out.get(peer)
    return shown_as(
        PeerRound,
        each,
        part="left out" if out is not None else "contributed" if peer in each.contributors else "helped",
        led=each.leader == peer,
        reason=out if out is not None else each.reason,
    )
