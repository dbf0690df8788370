"""A peer's reach in one sentence for people."""

from __future__ import annotations

from collections.abc import Sequence

from swarmcli.network.addresses import Scope
from swarmcli.reach.verdict import ReachVerdict


def in_words(verdicts: Sequence[ReachVerdict], dialable: bool | None, *, wished: bool, relays: int) -> str:
    """One sentence. `dialable`: whether others can dial this peer (None: not known yet); `wished`: its user wants
    nobody to; `relays`: how many carry its connections."""
    instead = "it takes part with those whom it can dial"
    if relays:
        instead = f"it takes part through {relays} {'relay' if relays == 1 else 'relays'}, and dials those it can"
    if wished:
        return f"nobody dials this peer, as was wished; {instead}"
    if dialable is None:
        return "this peer is finding out whether others can dial it"
    if not dialable and not any(verdict.dialable is False for verdict in verdicts):
        return f"nobody could be asked yet whether others can dial this peer; {instead}"
    if not dialable:
        return f"others cannot dial this peer: its router or firewall lets nobody in; {instead}"
    verdict = max((each for each in verdicts if each.dialable), key=lambda each: each.scope)
    if verdict.scope is Scope.HOST:
        return "peers on this machine can dial this peer"
    where = "peers in this network" if verdict.scope is Scope.LAN else "others"
    how = "" if verdict.how != "assumed" or verdict.scope is not Scope.INTERNET else ", as far as it knows"
    mapped = ", by a port that its router has opened for it" if verdict.how == "mapped" else ""
    return f"{where} can dial this peer at {verdict.address}{mapped}{how}"
