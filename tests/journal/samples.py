"""Events and records to write, and a clock that only moves when it is told to."""

from __future__ import annotations

from swarmcli import events as happened
from swarmcli.journal import RunRecord

ALICE, BOB, CAROL = "a" * 52, "b" * 52, "c" * 52
RUN = RunRecord("stdlib-lm", "trainer", ALICE, "alice", "0.1.0")
START = 1_790_000_000.0


class Clock:
    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def epoch(number: int, loss: float | None = 2.5, samples: int = 1000) -> happened.EpochAdvanced:
    return happened.EpochAdvanced(number, "ab" * 32, samples, 400, 2, loss, 8.0, 0.25)


def averaging_round(
    number: int, outcome: happened.RoundOutcome = "committed", reason: str = ""
) -> happened.RoundFinished:
    return happened.RoundFinished(
        round_id=f"{number:064x}",
        purpose="stdlib-lm.grads",
        outcome=outcome,
        reason=reason,
        epoch=number,
        leader=ALICE,
        members=(ALICE, BOB, CAROL),
        contributors=(ALICE, BOB),
        left_out={CAROL: "no part arrived for 4.0 s"},
        bytes_sent=1000,
        bytes_received=900,
        seconds={"forming": 0.125, "averaging": 0.25},
    )


def seen(peer: str = BOB, *, gone: happened.Gone = "", epoch: int = 1, name: str = "bob") -> happened.PeerSeen:
    return happened.PeerSeen(peer, name, "trainer", epoch, 30, 12.5, False, gone)
