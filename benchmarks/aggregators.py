"""What each aggregator costs a reducer: processor time, and memory beside the average, for each MiB of parts.

Parts of 512 KiB of float32, as they come with default settings. In a round in which everyone reduces its share, as much
comes in at each member as its tensors take, in whatever group. The least of several runs counts.
"""

from __future__ import annotations

import time

import torch

from swarmcli.averaging.aggregators import Aggregator, CenteredClip, Mean, Median, TrimmedMean

NUMEL = 131072
MEMBERS = (4, 16)
TIMES = 15
AGGREGATORS: dict[str, Aggregator] = {
    "mean without a gate": Mean(gate=float("inf")),
    "mean": Mean(),
    "median": Median(),
    "trimmed mean": TrimmedMean(),
    "centered clip": CenteredClip(),
    "centered clip, 1 iteration": CenteredClip(iterations=1),
}


def measure(aggregator: Aggregator, members: int) -> tuple[float, float]:
    """Milliseconds for each MiB that comes in, and how many parts are held at most, the average not counted."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(NUMEL, generator=generator) for _ in range(members)]
    memory, taken, held = torch.empty(NUMEL), [], 0
    for _ in range(TIMES):
        began = time.process_time()
        part = aggregator.part(memory, members)
        for sender, each in enumerate(values):
            part.add(each, 1.0 + sender, sender)
            held = max(held, part.nbytes)
        part.finish()
        taken.append(time.process_time() - began)
    return min(taken) * 1e3 / (members * NUMEL * 4 / 2**20), held / (NUMEL * 4)


def main() -> None:
    torch.set_num_threads(1)
    print("| aggregator | members | ms per MiB | parts held |\n| --- | --- | --- | --- |")
    for members in MEMBERS:
        for name, aggregator in AGGREGATORS.items():
            milliseconds, held = measure(aggregator, members)
            print(f"| {name} | {members} | {milliseconds:.2f} | {held:.0f} |", flush=True)


if __name__ == "__main__":
    main()
