"""Why rounds failed or went on without somebody, counted by reason over the latest of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from swarmcli.events import RoundFinished

MOST_CAUSES = 200  # the most frequent ones; other peers choose their words
MAX_CAUSE = 200  # characters


@dataclass(frozen=True, slots=True)
class Failure:
    """Rounds that failed, or went on without somebody, for one reason, without its numbers and peers."""

    reason: str
    what: Literal["round", "left out"]
    count: int
    first: float
    last: float
    example: str  # the reason as it was last given


def count_failures(rounds: Iterable[RoundFinished]) -> list[Failure]:
    """Returns the most frequent reasons first; `rounds`: the oldest first."""
    found: dict[tuple[str, str], Failure] = {}
    for ended in rounds:
        for each in _failures_of(ended):
            before = found.get((each.what, each.reason))
            found[each.what, each.reason] = (
                replace(each, count=before.count + 1, first=before.first) if before is not None else each
            )
    return sorted(found.values(), key=lambda each: -each.count)[:MOST_CAUSES]


def _failures_of(ended: RoundFinished) -> Iterator[Failure]:
    if ended.outcome != "committed":
        unknown = "no reason was given" if ended.outcome == "failed" else "its outcome could not be learned"
        text = ended.reason or unknown
        yield Failure(cause_of(text, ended.members), "round", 1, ended.time, ended.time, text[:MAX_CAUSE])
    for peer, why in ended.left_out.items():
        cause = cause_of(why, (*ended.members, peer))
        yield Failure(cause, "left out", 1, ended.time, ended.time, why[:MAX_CAUSE])


def cause_of(reason: str, peers: Iterable[str]) -> str:
    """Returns a reason without what differs from time to time: peers, addresses and numbers."""
    for peer in peers:
        if peer:
            reason = reason.replace(peer, "…").replace(peer[:10], "…")
    reason = re.sub(r"\b\w+://\S+", "…", reason)
    reason = re.sub(r"\b[a-z2-7]{52}\b", "…", reason)
    return re.sub(r"\d+([.,:]\d+)*", "…", reason)[:MAX_CAUSE] or "another reason"
