"""What audits cost a round: the same round with and without them, in turns.

All peers are on the loopback interface, where a round takes nothing but the processor: there audits weigh most.

    python -m benchmarks.audits
"""

from __future__ import annotations

import statistics

from benchmarks._averaging_peers import average_here
from benchmarks._contest import Crew, compete, ratio
from swarmcli.averaging.config import AllreduceOptions

MIB = 1 << 20
TURNS = 6


def main() -> None:
    for name, peers, nbytes, half in (
        ("1 MiB, 4 peers", 4, MIB, False),
        ("64 MiB, 4 peers", 4, 64 * MIB, False),
        ("64 MiB, 4 peers, float16", 4, 64 * MIB, True),
    ):
        crews = {
            "without": Crew(average_here, peers, peers, nbytes, half, 0.0),
            "with": Crew(average_here, peers, peers, nbytes, half, AllreduceOptions().audit),
        }
        try:
            turns = compete(dict(crews), TURNS)
        finally:
            for crew in crews.values():
                crew.end()
        seconds = {each: statistics.median(turn.seconds for turn in turns[each]) for each in turns}
        busy = {each: statistics.median(turn.processor for turn in turns[each]) for each in turns}
        print(
            f"{name}: {seconds['without']:.3f} s without audits, {seconds['with']:.3f} s with them "
            f"({100 * (ratio(turns['with'], turns['without']) - 1):+.0f} %); "
            f"of the processor {busy['without']:.3f} and {busy['with']:.3f} s a peer"
        )


if __name__ == "__main__":
    main()
