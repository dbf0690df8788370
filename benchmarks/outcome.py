"""What it takes to agree on a round's outcome, under virtual time: seconds, and bytes of all words.

    python -m benchmarks.outcome [MEMBERS ...]          4, 16, 64 and 128 by default

The members are strangers, each of another network, connected with each other as after a round's parts, 20 ms apart. All
hold the same averages at the same moment. Beside the plain case, f of them freeze then, and one has a line of 10 kB/s.
Printed are the seconds until the first, the median and the last of those that are not frozen hold the certificate (one
behind the slow line apart), what each of them sends of words, and what a stored outcome takes. Nothing here measures
this machine.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from swarmcli.network import wire
from swarmcli.testing import virtual_time
from tests.averaging.outcome.talk import Voter, agree, voters_of

LINE = 10_000.0  # bytes per second


async def measure(count: int, frozen: int, slow: bool) -> str:
    async with voters_of(count) as (network, voters):
        if slow:
            network.set_bandwidth(voters[-1].peer, LINE)
        for voter in voters[1 : 1 + frozen]:
            network.freeze(voter.peer)
        able = [voter for voter in voters if voter not in voters[1 : 1 + frozen]]
        await agree(able)
        told = _told(able[:-1] if slow else able)
        if slow:
            seconds = "never" if voters[-1].seconds is None else f"{voters[-1].seconds:.1f} s"
            told += f"; the slow one after {seconds}, {voters[-1].sent / 1000:.0f} kB"
        assert able[0].agreement is not None
        stored = len(wire.encode(able[0].agreement.outcome.beyond(())))
    return f"{told}; {stored / 1000:.1f} kB kept"


def _told(voters: Sequence[Voter]) -> str:
    seconds = sorted(voter.seconds for voter in voters if voter.seconds is not None)
    sent = [voter.sent for voter in voters]
    times = f"{seconds[0]:.2f}, {statistics.median(seconds):.2f}, {seconds[-1]:.2f} s" if seconds else "nobody"
    missing = f" ({len(voters) - len(seconds)} never)" if len(seconds) < len(voters) else ""
    words, usual = statistics.median(voter.words for voter in voters), statistics.median(sent)
    return f"{times}{missing}; {usual / 1000:.1f} kB each in {words:.0f} words, {max(sent) / 1000:.1f} at most"


def main() -> None:
    sizes = [int(word) for word in sys.argv[1:] if word.isdigit()] or [4, 16, 64, 128]
    for count in sizes:
        hostile = (count - 1) // 3
        for name, frozen, slow in (("all there", 0, False), (f"{hostile} frozen", hostile, False), ("slow", 0, True)):
            told = virtual_time.run(measure(count, frozen, slow))
            print(f"{count:4} members, {name:10}: {told}", flush=True)


if __name__ == "__main__":
    main()
