"""All-reduce and state download, beside hivemind, gloo and bare TLS, which take turns with it in the same run.

Each peer is a process of its own with one torch thread. This project and hivemind run the same program: `step` of an
averager, which finds its group first, and `load_state_from_peers`. hivemind is told the size of the group, for else it
waits for more members until its matchmaking time is over; here the group is everyone who is there. Bare TLS moves the
bytes that the round has to move between as many processes and does nothing else. gloo encrypts nothing, and its group
is fixed.

    python -m benchmarks.averaging [round] [float16] [two] [small] [state]
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._averaging_peers import average_here, average_with_gloo, send_bare, share_state_here
from benchmarks._contest import Contestant, Crew, Script, Turn, compete, ratio

MIB = 1 << 20
TURNS = 5
_HERE = Path(__file__).parent
_PEERS_PYTHON = _HERE.parent / ".venv-peers" / "bin" / "python"


@dataclass(frozen=True)
class Case:
    name: str
    peers: int
    nbytes: int  # of float32
    target: float  # at most this part of hivemind's time
    half: bool = False  # float16 on the wire
    state: bool = False  # a download instead of a round

    def contestants(self) -> dict[str, Contestant]:
        crews: dict[str, Contestant] = {}
        if self.state:
            crews["swarm"] = Crew(share_state_here, 2, self.nbytes)
            crews["bare TLS"] = Crew(send_bare, 2, 2, self.nbytes, True)
        else:
            crews["swarm"] = Crew(average_here, self.peers, self.peers, self.nbytes, self.half)
            # Everyone sends parts to everyone, and averages: two n-ths of the vector to each other peer.
            each = 2 * self.nbytes // self.peers // (2 if self.half else 1)
            crews["bare TLS"] = Crew(send_bare, self.peers, self.peers, each, False)
        if not self.state and not self.half:
            crews["gloo"] = Crew(average_with_gloo, self.peers, self.peers, self.nbytes)
        if _PEERS_PYTHON.exists():
            kind = "state" if self.state else "float16" if self.half else "none"
            script = str(_HERE / "peers" / "averaging_hivemind.py")
            crews["hivemind"] = Script([str(_PEERS_PYTHON), script, str(self.peers), str(self.nbytes), kind])
        return crews


CASES = {
    "round": Case("64 MiB float32, 4 peers", 4, 64 * MIB, 0.35),
    "float16": Case("64 MiB, 4 peers, float16 on the wire", 4, 64 * MIB, 0.35, half=True),
    "two": Case("256 MiB, 2 peers", 2, 256 * MIB, 0.40),
    "small": Case("1 MiB, 4 peers, with finding the group", 4, MIB, 0.20),
    "state": Case("state of 256 MiB, one donor", 2, 256 * MIB, 0.35, state=True),
}


def run(case: Case) -> dict[str, list[Turn]]:
    contestants = case.contestants()
    try:
        return compete(contestants, TURNS)
    finally:
        for contestant in contestants.values():
            contestant.end()


def show(case: Case, turns: dict[str, list[Turn]]) -> None:
    print(f"\n{case.name}   (load {os.getloadavg()[0]:.1f})")
    for name, results in turns.items():
        seconds = statistics.median(turn.seconds for turn in results)
        least = min(turn.seconds for turn in results)
        processor = [turn.processor for turn in results if turn.processor is not None]
        line = f"  {name:10}{seconds * 1000:8.0f} ms (least {least * 1000:.0f})"
        if processor:
            line += f"   processor {statistics.median(processor) * 1000:.0f} ms per peer"
        if name != "swarm":
            line += f"   swarm / this: {ratio(turns['swarm'], results):.2f}"
        if name == "hivemind":
            met = ratio(turns["swarm"], results) <= case.target
            line += f", target {case.target:.2f}: {'met' if met else 'MISSED'}"
        print(line, flush=True)


def main(wanted: Sequence[str] = ()) -> None:
    unknown = set(wanted) - set(CASES)
    if unknown:
        sys.exit(f"no such case: {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    for name in wanted or CASES:
        show(CASES[name], run(CASES[name]))


if __name__ == "__main__":
    main(sys.argv[1:])
