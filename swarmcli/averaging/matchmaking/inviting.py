"""Whom a peer expects among its followers, how long it waits for each, and whom it invites. No input or output here."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from swarmcli.averaging.matchmaking.candidates import Entry, Plan, Roll
from swarmcli.network.identity import PeerID

MAX_INVITATIONS = 3  # to one search of one peer
INVITATIONS_AT_ONCE = 16


def expected_followers(plan: Plan, roll: Roll, here: Container[PeerID], now: float) -> list[Entry]:
    """Those who should come to the peer whose roll this is and are not here yet."""
    expected = [peer for peer, leader in plan.dealt.items() if leader == roll.own_id and peer not in here]
    entries = [roll.entries[peer] for peer in expected]
    # With several groups whoever follows another leader belongs there; otherwise its leader will bring it along.
    return [entry for entry in entries if not (plan.crowded and entry.follows_until > now)]


def hope(entry: Entry, *, slack: float, patience: float) -> float:
    """Until when the group waits for this candidate. An answer to an invitation is waited for `slack` seconds."""
    if entry.invitations:
        # Whoever follows somebody else is brought along by him, or sent here.
        return max(entry.coming_until, entry.follows_until, entry.invited_at + slack)
    return entry.since + (patience if entry.candidate.listening else patience / 2)


def invite(expected: Iterable[Entry], *, pause: float, connected: Callable[[PeerID], bool], now: float) -> list[Entry]:
    """Whom to invite now, which counts as done; the same one again after `pause` seconds at the earliest."""
    chosen = [
        entry
        for entry in expected
        if entry.invitations < MAX_INVITATIONS
        and now >= entry.invited_at + pause
        and entry.follows_until <= now
        and (entry.candidate.listening or connected(entry.candidate.peer_id))
    ][:INVITATIONS_AT_ONCE]
    for entry in chosen:
        entry.invited_at = now
        entry.invitations += 1
    return chosen
