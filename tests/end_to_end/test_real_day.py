"""Hours of a run of real processes whose volunteers are killed, sleep and lend little: nothing grows or is lost."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from pathlib import Path

import psutil
import pytest

from benchmarks._homes import Internet, missing
from swarmcli.cli.processes import Child, Children
from swarmcli.journal import JOURNAL_NAME
from tests.end_to_end.swarm import Swarm, poll
from tests.end_to_end.test_unlike_chaos import Chaos, Volunteer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.soak,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

HOURS = float(os.environ.get("SWARM_SOAK_HOURS", "0.25"))  # 24 for the whole day
# trainers that are left alone, and trainers that are killed, frozen and limited
STEADY, OTHERS = ("ann", "bob"), ("cem", "eve")
CALM, FREEZES = (10.0, 60.0), (1.0, 300.0)  # seconds between two strikes, and of a laptop's sleep
LOOKS = 24  # times that the test looks at what each process holds
STANDS = 60.0  # seconds without a new epoch at which the test fails; an epoch takes three
# the last third's peak may be so many times the second third's, and so much more
GROWTH, ROOM = 1.1, {"memory": 32 << 20, "files": 8, "sockets": 8, "threads": 4}


class Held:
    """The memory, files, sockets and threads of one process over time."""

    def __init__(self, child: Child, home: Path) -> None:
        self.process, self.home = psutil.Process(child.pid), home
        self.looks: dict[str, list[int]] = defaultdict(list)

    def look(self) -> None:
        held = [os.path.realpath(each) for each in Path(f"/proc/{self.process.pid}/fd").iterdir()]
        sockets = sum("socket:" in each for each in held)
        with self.process.oneshot():
            now = {
                "memory": self.process.memory_info().rss,
                "files": len(held) - sockets,
                "sockets": sockets,
                "threads": self.process.num_threads(),
            }
        for what, count in now.items():
            self.looks[what].append(count)

    def grown(self) -> dict[str, list[int]]:
        third = len(self.looks["memory"]) // 3
        return {
            what: counts
            for what, counts in self.looks.items()
            if max(counts[-third:]) > GROWTH * max(counts[third : 2 * third]) + ROOM[what]
        }


@pytest.mark.timeout(int(3600 * (HOURS + 1)))
def test_hours_of_churn_leave_nothing_behind(tmp_path: Path) -> None:
    with Children() as children, Internet() as internet:
        run = Swarm(tmp_path, children, max_epochs=1_000_000, host="0.0.0.0")
        lent = ["--limit", "processor=20%"]  # of their computers, as volunteers do
        place = internet.machine("monitor")
        monitor = run.start_contact("monitor", "monitor", "--web", "0", prefix=place.prefix)
        steady = [run.start("join", name, *lent, prefix=internet.machine(name).prefix) for name in STEADY]
        shaken = [Volunteer(run, internet, "join", name) for name in OTHERS]
        helper = Volunteer(run, internet, "aux", "dan")
        run.wait(lambda: all(run.epoch(name) > 3 for name in (*STEADY, *OTHERS)), "all train", monitor, *steady)
        chaos = Chaos([*shaken, helper], 1, calm=CALM, freezes=FREEZES)
        held = [Held(child, run.home(child.name)) for child in (monitor, *steady)]
        began = time.monotonic()
        epoch, since, longest = 0, began, 0.0
        while (now := time.monotonic()) < began + HOURS * 3600:
            chaos.look()
            if new := run.epochs("ann", after=epoch):
                epoch, since = new[-1].epoch, now
            longest = max(longest, now - since)
            assert longest < STANDS, f"the run stands still at epoch {epoch}: {chaos.strikes[-9:]}\n{run.last_words()}"
            if now > began + HOURS * 3600 * len(held[0].looks["memory"]) / LOOKS:
                for each in held:
                    each.look()
            poll()
        chaos.end()
        at = run.epoch("ann")
        everyone = [*steady, *(each.child for each in shaken)]
        for child in everyone:
            run.wait_for_epoch(child.name, at + 3, child)
        run.end_in_step(*everyone)
        said = {each.home.name: dict(each.looks) for each in held}
        sizes = {home: (run.home(home) / JOURNAL_NAME).stat().st_size for home in ("monitor", *STEADY, *OTHERS)}
        print(f"{epoch} epochs, the longest {longest:.1f} s; {Counter(chaos.strikes)}; {said}; journals {sizes}")
        assert not any(each.grown() for each in held), said
        check_contributions(run)


def check_contributions(run: Swarm) -> None:
    """Each round counted as many samples as its members gave, unless one was killed before it had written that down."""
    taken, given, told = dict[str, int](), Counter[str](), Counter[str]()
    members: dict[str, int] = {}
    for name in (*STEADY, *OTHERS):
        for each in run.epochs(name):
            if each.samples and each.own_samples:
                taken[each.lineage], members[each.lineage] = each.samples, each.peers
                given[each.lineage] += each.own_samples
                told[each.lineage] += 1
    whole = [lineage for lineage in taken if told[lineage] == members[lineage]]
    assert len(whole) > 0.9 * len(taken), f"{len(whole)} of {len(taken)} rounds are written down by all"
    assert all(given[lineage] >= taken[lineage] for lineage in whole)
    # of larger groups no member counts for more than a share
    few = [lineage for lineage in whole if members[lineage] <= 3]
    assert all(given[lineage] == taken[lineage] for lineage in few)
