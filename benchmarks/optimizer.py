"""What the Optimizer costs a trainer: time per epoch and per step, memory, and learning with compressed gradients.

Each trainer is a process; hivemind's run the same loop (benchmarks/_training.py) right after. A trainer computes for a
fixed time per batch. "Beyond computing" is what an epoch takes more than its share of batches: time inside step(), and
batches that the epoch did not need.

    python -m benchmarks.optimizer [epoch] [gpt2] [step] [memory] [convergence]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks import _convergence, _memory
from benchmarks._contest import Crew
from benchmarks._trainers import measure_steps, train_here
from benchmarks._training import Epoch, Work, own_step

_HERE = Path(__file__).parent
_PEERS_PYTHON = _HERE.parent / ".venv-peers" / "bin" / "python"
_PATIENCE = 300.0  # seconds for all epochs of one kind of trainers
EPOCH_TARGET = 0.15  # seconds beyond computing, small model
STEP_TARGET = 1e-3  # seconds of a step beyond one addition

# An epoch computes for a second, its batches for a twentieth of one.
SMALL = Work("small", 2, batches=20, seconds=0.05, epochs=10, uncounted=3)
GPT2 = Work("gpt2", 2, batches=1, seconds=3.0, epochs=6, uncounted=3)


def ours(work: Work) -> list[list[Epoch]]:
    crew = Crew(train_here, work.peers, work)
    try:
        return crew.ask(_PATIENCE)
    finally:
        crew.end()


def hivemind(work: Work) -> list[list[Epoch]]:
    command = [str(_PEERS_PYTHON), str(_HERE / "peers" / "optimizer_hivemind.py"), json.dumps(asdict(work))]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=_PATIENCE)
    return [[Epoch(**epoch) for epoch in peer] for peer in json.loads(done.stdout)]


def beyond(work: Work, trainers: Sequence[Sequence[Epoch]]) -> float:
    """Seconds per epoch beyond computing, the median over all trainers and epochs."""
    return statistics.median(epoch.seconds - work.computing for peer in trainers for epoch in peer)


def describe(work: Work, name: str, trainers: Sequence[Sequence[Epoch]]) -> str:
    every = [epoch for peer in trainers for epoch in peer]
    inside = statistics.median(epoch.inside for epoch in every)
    batches = statistics.fmean(epoch.batches for epoch in every)
    return (
        f"  {name:34}{beyond(work, trainers):7.3f} s beyond computing (inside step() {inside:.3f} s; "
        f"{batches:.1f} of {work.batches} batches)"
    )


def run_epochs(work: Work, name: str, others: dict[str, Callable[[], list[list[Epoch]]]]) -> float:
    """Ours first, then each of the others beside it; returns ours."""
    mine = ours(work)
    print(describe(work, name, mine), flush=True)
    for other, run in others.items():
        theirs = run()
        share = beyond(work, mine) / beyond(work, theirs)
        print(f"{describe(work, other, theirs)}; swarm / this: {share:.2f}", flush=True)
    return beyond(work, mine)


def _verdict(value: float, target: float) -> str:
    return f"target {target:g}: {'met' if value <= target else 'MISSED'}"


def _hivemind(work: Work, matchmaking_time: float) -> dict[str, Callable[[], list[list[Epoch]]]]:
    if not _PEERS_PYTHON.exists():
        return {}
    other = replace(work, matchmaking_time=matchmaking_time)
    return {f"hivemind, matchmaking {matchmaking_time:g} s": lambda: hivemind(other)}


def _epoch() -> None:
    for peers in (2, 4):
        work = replace(SMALL, peers=peers)
        print(f"{peers} trainers, 26,000 parameters, epochs of {work.computing:g} s (load {os.getloadavg()[0]:.1f})")
        seconds = run_epochs(work, "swarm, default options", _hivemind(work, 1.5))
        print(f"  {_verdict(seconds, EPOCH_TARGET)}", flush=True)


def _gpt2() -> None:
    print(f"2 trainers, 124 million parameters, one batch of {GPT2.seconds:g} s (load {os.getloadavg()[0]:.1f})")
    print(f"  the optimizer's own step takes {own_step(GPT2):.3f} s of what follows", flush=True)
    run_epochs(GPT2, "swarm, default options", _hivemind(replace(GPT2, epochs=5, uncounted=2), 3.0))
    run_epochs(replace(GPT2, rank=32), "swarm, PowerSGD rank 32", {})


def _step() -> None:
    for model, pause in (("small", 0.01), ("gpt2", 0.1)):
        work = Work(model, 1, batches=40, seconds=pause, epochs=0)
        crew = Crew(measure_steps, 1, work)
        try:
            ((step, addition),) = crew.ask()
        finally:
            crew.end()
        print(
            f"  {model:6} step {step * 1000:8.3f} ms, one addition {addition * 1000:8.3f} ms: "
            f"{(step - addition) * 1000:.3f} ms more (load {os.getloadavg()[0]:.1f}); "
            f"{_verdict(step - addition, STEP_TARGET)}",
            flush=True,
        )


def _memory_of_modes() -> None:
    _memory.measure(lambda line: print(line, flush=True))


def _learning() -> None:
    torch.set_num_threads(1)
    _convergence.compare((1, 2))


CASES = {"epoch": _epoch, "gpt2": _gpt2, "step": _step, "memory": _memory_of_modes, "convergence": _learning}


def main(wanted: Sequence[str] = ()) -> None:
    unknown = set(wanted) - set(CASES)
    if unknown:
        sys.exit(f"no such case: {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    for name in wanted or CASES:
        print(f"\n{name}", flush=True)
        CASES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
