"""Volunteers as they are, as real processes on hosts of their own: killed, frozen, limited, and back every time."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks._homes import Internet, missing
from swarmcli.cli.processes import Child, Children
from tests.end_to_end.swarm import Swarm, poll

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

EPOCHS = 450
TRAINERS = ("ann", "bob", "cem")
FREEZES = (1.0, 12.0)  # seconds
AWAY = (0.5, 6.0)  # seconds between a kill and the next start
LIMITED = (3.0, 20.0)  # seconds
LIMITS = ("10kB/s", "30kB/s", "100kB/s")
MONITOR_GONE = 60.0  # seconds
CALM = (1.0, 7.0)  # seconds between two strikes
# seconds without hindrance that another trainer must have had before a strike: a run whose state nobody holds begins
# anew
WHOLE = 10.0
SHARE = 0.5  # of what a trainer could have given, that has to be in the run
LOOK = 1.0  # seconds between two looks at who stands where


class Volunteer:
    """A peer on a host of its own, and since when it could work."""

    def __init__(self, run: Swarm, internet: Internet, verb: str, name: str) -> None:
        self.run, self.verb, self.name = run, verb, name
        self.prefix = internet.machine(name).prefix
        self.config = run.directory / f"{name}.yaml"
        self.able = 0.0  # seconds for which it was up, not frozen and not limited
        self._since = time.monotonic()
        self.hindered = ""  # what hinders it; "": nothing
        self.child = self.start()

    def start(self) -> Child:
        environment = {"SWARM_CONFIG": str(self.config), "SWARM_RUNTIME_DIR": str(self.run.home(self.name) / "run")}
        self._started = time.time()
        self.child = self.run.start(self.verb, self.name, prefix=self.prefix, environment=environment)
        return self.child

    def hinder(self, what: str) -> None:
        """Stops counting the time in which the volunteer is able to work, since something hinders it from now on; "":
        it counts again."""
        if not self.hindered:
            self.able += time.monotonic() - self._since
        self.hindered, self._since = what, time.monotonic()

    def limit(self, upload: str | None) -> None:
        text = f"limits:\n  upload: {upload}\n" if upload else "limits: {}\n"
        new = self.config.with_suffix(".new")
        new.write_text(text)
        new.replace(self.config)

    @property
    def joined(self) -> bool:
        """Whether the process that runs now has written its `peer.json`."""
        told = self.run.home(self.name) / "peer.json"
        return told.exists() and told.stat().st_mtime >= self._started

    @property
    def whole(self) -> float:
        """Seconds for which nothing has hindered it."""
        return 0.0 if self.hindered else time.monotonic() - self._since

    @property
    def samples(self) -> int:
        return sum(each.own_samples for each in self.run.epochs(self.name))

    @property
    def pace(self) -> float:
        """The median over its epochs of its samples per second."""
        worked = [each.own_samples / each.seconds for each in self.run.epochs(self.name) if each.own_samples]
        return statistics.median(worked)


class Chaos:
    """Strikes volunteers, drawn by a seed; only one thing at a time happens to each."""

    def __init__(
        self,
        volunteers: list[Volunteer],
        seed: int,
        *,
        calm: tuple[float, float] = CALM,
        freezes: tuple[float, float] = FREEZES,
    ) -> None:
        self.volunteers, self.calm, self.freezes = volunteers, calm, freezes
        self.drawn = random.Random(seed)
        self.next = time.monotonic()
        self.ends: dict[Volunteer, float] = {}
        self.strikes: list[str] = []

    def look(self) -> None:
        now = time.monotonic()
        for volunteer in [each for each, end in self.ends.items() if now >= end]:
            self._mend(volunteer)
        if now >= self.next:
            self.next = now + self.drawn.uniform(*self.calm)
            self._strike(self.drawn.choice(self.volunteers))

    def _strike(self, volunteer: Volunteer) -> None:
        others = [each for each in self.volunteers if each.verb == "join" and each is not volunteer]
        if volunteer.hindered or not any(each.whole >= WHOLE for each in others):
            return
        what = self.drawn.choice(["kill", "freeze", "limit"])
        volunteer.hinder(what)
        self.strikes.append(f"{what} {volunteer.name}")
        if what == "kill":
            volunteer.child.kill()
        elif what == "freeze":
            os.kill(volunteer.child.pid, signal.SIGSTOP)
        else:
            volunteer.limit(self.drawn.choice(LIMITS))
        self.ends[volunteer] = time.monotonic() + self.drawn.uniform(
            *{"kill": AWAY, "freeze": self.freezes, "limit": LIMITED}[what]
        )

    def _mend(self, volunteer: Volunteer) -> None:
        match volunteer.hindered:
            case "kill":
                volunteer.start()
                volunteer.hindered = "starts"
            case "starts" if not volunteer.joined:
                assert volunteer.child.returncode is None, volunteer.child.last_words(20)
                return
            case "freeze":
                os.kill(volunteer.child.pid, signal.SIGCONT)
            case "limit":
                volunteer.limit(None)
        if volunteer.hindered != "starts" or volunteer.joined:
            del self.ends[volunteer]
            volunteer.hinder("")

    def end(self) -> None:
        """Waits until all are up, thawed and without limits."""
        while self.ends:
            for volunteer in list(self.ends):
                self._mend(volunteer)
            poll()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_everybody_is_back_and_in_step_after_450_epochs_of_chaos(tmp_path: Path) -> None:
    with Children() as children, Internet() as internet:
        run = Swarm(tmp_path, children, max_epochs=100_000, host="0.0.0.0")
        place = internet.machine("monitor")
        monitor = run.start_contact("monitor", "monitor", "--web", "0", prefix=place.prefix)
        port = run.contact.split("/")[2].rpartition(":")[2]
        trainers = [Volunteer(run, internet, "join", name) for name in TRAINERS]
        helper = Volunteer(run, internet, "aux", "dan")
        run.wait(lambda: all(each.samples for each in trainers), "all contribute", monitor)
        for each in trainers:
            each.hinder("")  # from here on their time counts
        given = {each: each.samples for each in trainers}
        began = [each.able for each in trainers]
        chaos = Chaos([*trainers, helper], 1)
        goes, comes = EPOCHS / 3, 0.0  # the epoch at which the monitor goes, and when it comes back
        longest = 0.0
        epoch, since = 0, time.monotonic()
        while (now := max(run.epoch(each.name) for each in trainers)) < EPOCHS:
            chaos.look()
            if now > epoch:
                epoch, since = now, time.monotonic()
            longest = max(longest, time.monotonic() - since)
            assert longest < 120, f"the run stands still at epoch {now}: {chaos.strikes[-12:]}\n{run.last_words()}"
            if epoch >= goes and monitor.returncode is None and not comes:
                monitor.kill()
                comes = time.monotonic() + MONITOR_GONE
            if comes and time.monotonic() >= comes and monitor.returncode is not None:
                monitor = run.start("monitor", "monitor", "--web", "0", "--port", port, prefix=place.prefix)
            poll()
        for each in trainers:
            each.hinder("the end" if not each.hindered else each.hindered)
        chaos.end()
        shares = {
            each.name: (each.samples - given[each]) / (each.pace * (each.able - before))
            for each, before in zip(trainers, began, strict=True)
        }
        kinds = Counter(strike.split()[0] for strike in chaos.strikes)
        said = f"{dict(kinds)}, longest epoch {longest:.1f} s, shares {shares}"
        print(said)
        at = max(run.epoch(each.name) for each in trainers)
        for each in trainers:
            run.wait_for_epoch(each.name, at + 3, each.child)
        run.end_in_step(*(each.child for each in trainers))
        assert min(shares.values()) >= SHARE, said
