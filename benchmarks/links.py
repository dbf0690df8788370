"""Rounds over slow links, and how much they slow down the steps of a trainer beside them.

Each peer is a process behind a link of its own (network namespaces with tbf; see _namespaces.py). Printed is which
part of the speed that the links allow a round reaches: the seconds of the best division on these links, with the bytes
of Ethernet, IP and TCP counted as transport, over those of the all-reduce. Peers find their group before, as users' do.

    python -m benchmarks.links [equal] [unequal] [measured] [step] [lost] [lost_late]
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch

import swarmcli
from benchmarks import _namespaces as namespaces
from swarmcli.averaging.group import Member
from swarmcli.averaging.shares import reducing_shares, slowest_line
from swarmcli.network import PeerID

MIB = 1 << 20
STEP_TARGET = 1.10  # a trainer's step while a round runs, beside the same step alone
LOST_TARGET = 1.5  # a round that loses a reducer in its middle, beside an undisturbed one
STEPS = 40  # in each stretch, with a round and without


def run_peer(pipe: Pipe, index: int, mbit: float, nbytes: int, peers: int, given: bool) -> None:
    """Averages whenever it is told to, and says how long the all-reduce took."""
    torch.set_num_threads(1)
    averager = averager_behind(pipe, index, mbit, nbytes, peers, mbit if given else None)
    while True:
        pipe.recv()
        control = averager.step(wait=False, timeout=600)
        assert control is not None
        pipe.send(control.result(600).seconds["running all-reduce"])


def averager_behind(
    pipe: Pipe, index: int, mbit: float, nbytes: int, peers: int, bandwidth: float | None
) -> swarmcli.DecentralizedAverager:
    """A started averager of a process that a Swarm has started, behind its link."""
    host = namespaces.settle(pipe, index, mbit)
    first = swarmcli.DHT(start=True, host=host) if index == 0 else None
    pipe.send(first.get_visible_addresses()[0] if first else None)
    contact = pipe.recv()
    dht = first or swarmcli.DHT([contact], start=True, host=host)
    return swarmcli.DecentralizedAverager(
        [torch.full((nbytes // 4,), float(index))],
        dht,
        prefix="bench",
        target_group_size=peers,
        min_group_size=peers,
        min_matchmaking_time=60.0,
        bandwidth=bandwidth,
        start=True,
    )


class Swarm:
    """Peers behind links; ended by `kill`."""

    def __init__(self, target: Callable[..., None], links: Sequence[float], *arguments: Any) -> None:
        namespaces.make_bridge()
        context = multiprocessing.get_context("spawn")
        self.pipes, self._processes = [], []
        for index, mbit in enumerate(links):
            mine, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, index, mbit, *arguments), daemon=True)
            process.start()
            self.pipes.append(mine)
            self._processes.append(process)
        for index, (pipe, mbit) in enumerate(zip(self.pipes, links, strict=True)):
            namespaces.connect(pipe.recv(), index, mbit)
        self.tell("connected")
        contacts = [pipe.recv() for pipe in self.pipes]
        self.tell(contacts[0])

    def tell(self, message: Any) -> None:
        for pipe in self.pipes:
            pipe.send(message)

    def kill(self, index: int | None = None) -> None:
        """Kills one peer, or all of them."""
        for process in self._processes if index is None else [self._processes[index]]:
            process.kill()
            process.join()


def optimum(links: Sequence[float], nbytes: int) -> float:
    """Seconds of a round that the links allow: the best division's, with real bandwidths."""
    members = [Member(PeerID(bytes([index]) * 32), bandwidth=mbit) for index, mbit in enumerate(links)]
    vectors = slowest_line(members, reducing_shares(members, nbytes // 4))
    return vectors * nbytes / (1e6 / 8 * namespaces.PAYLOAD)


def measure_rounds(name: str, links: Sequence[float], nbytes: int, rounds: int, given: bool, target: float) -> None:
    swarm = Swarm(run_peer, links, nbytes, len(links), given)
    best = optimum(links, nbytes)
    reached = []
    for _ in range(rounds):
        swarm.tell("go")
        reached.append(best / max(pipe.recv() for pipe in swarm.pipes))
    swarm.kill()
    figures = ", ".join(f"{part:.2f}" for part in reached)
    verdict = "met" if reached[-1] >= target else "MISSED"
    print(
        f"  {name}: {best:.2f} s allowed; reached in each round {figures}; target {target:.2f}: {verdict}", flush=True
    )


def measure_loss(links: Sequence[float], nbytes: int, part: float) -> None:
    """The last peer is killed after this part of the time of an undisturbed round."""
    swarm = Swarm(run_peer, links, nbytes, len(links), False)
    swarm.tell("go")
    usual = max(pipe.recv() for pipe in swarm.pipes)
    swarm.tell("go")
    time.sleep(part * usual)
    swarm.kill(len(links) - 1)
    took = max(pipe.recv() for pipe in swarm.pipes[:-1])
    swarm.kill()
    print(
        f"  killed after {part:.0%}: {took:.1f} s beside {usual:.1f} s, x {took / usual:.2f}; "
        f"target {LOST_TARGET:.2f}: {'met' if took <= LOST_TARGET * usual else 'MISSED'}",
        flush=True,
    )


def run_trainer(pipe: Pipe, index: int, mbit: float, nbytes: int) -> None:
    """Peer 0 trains in its main thread, alone and while it averages; the others average. Each says what it measured:
    the median seconds of a step alone, and beside a round."""
    torch.set_num_threads(1)
    averager = averager_behind(pipe, index, mbit, nbytes, 2, None)
    step = _training_step()
    while True:
        pipe.recv()
        alone = [_timed(step) for _ in range(STEPS if index == 0 else 0)]
        control = averager.step(wait=False, timeout=600)
        assert control is not None
        beside = []
        while index == 0 and not control.done():
            beside.append(_timed(step))
        control.result(600)
        pipe.send((alone, beside))


def _training_step() -> Callable[[], None]:
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 10),
    )
    optimizer = torch.optim.Adam(model.parameters())
    inputs, labels = torch.randn(128, 512), torch.randint(10, (128,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def _timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def measure_step(mbit: float, nbytes: int, rounds: int) -> None:
    swarm = Swarm(run_trainer, [mbit, mbit], nbytes)
    ratios, alone, beside = [], [], []
    for number in range(rounds + 1):
        swarm.tell("go")
        without, during = swarm.pipes[0].recv()
        swarm.pipes[1].recv()
        if number:
            alone.append(statistics.median(without))
            beside.append(statistics.median(during))
            ratios.append(beside[-1] / alone[-1])
    swarm.kill()
    middle = statistics.median(ratios)
    print(
        f"  a step of {statistics.median(alone) * 1000:.1f} ms takes {statistics.median(beside) * 1000:.1f} ms while a "
        f"round runs: x {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f}); target {STEP_TARGET:.2f}: "
        f"{'met' if middle <= STEP_TARGET else 'MISSED'}",
        flush=True,
    )


def _equal() -> None:
    print("4 peers behind 100 Mbit/s, 32 MiB")
    measure_rounds("measured", [100] * 4, 32 * MIB, 3, False, 0.85)


def _unequal() -> None:
    print("3 peers behind 10, 50 and 100 Mbit/s, 8 MiB")
    measure_rounds("bandwidths given", [10, 50, 100], 8 * MIB, 2, True, 0.80)


def _measured() -> None:
    print("the same, nothing given: as measured in past rounds")
    measure_rounds("measured", [10, 50, 100], 8 * MIB, 4, False, 0.80)


def _step() -> None:
    print("a trainer's step beside a round, 2 peers behind 100 Mbit/s, 32 MiB")
    measure_step(100, 32 * MIB, 5)


def _lost() -> None:
    print("4 peers behind 100 Mbit/s, 256 MiB, one of the four reducers is killed")
    measure_loss([100] * 4, 256 * MIB, 0.5)


def _lost_late() -> None:
    print("the same, near the end of the round")
    measure_loss([100] * 4, 256 * MIB, 0.9)


CASES = {
    "equal": _equal,
    "unequal": _unequal,
    "measured": _measured,
    "step": _step,
    "lost": _lost,
    "lost_late": _lost_late,
}


def main(wanted: Sequence[str] = ()) -> None:
    unknown = set(wanted) - set(CASES)
    if unknown:
        sys.exit(f"no such case: {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    if not namespaces.permitted():
        print("  left out: this system does not let us make network namespaces with tbf (unshare -Urn, tc)")
        return
    for name in wanted or CASES:
        if namespaces.inside():
            CASES[name]()
        else:
            namespaces.rerun_inside("benchmarks.links", [name])


if __name__ == "__main__":
    main(sys.argv[1:])
