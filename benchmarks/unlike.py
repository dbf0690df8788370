"""Unlike volunteers: what a trainer with an uplink of 10 kB/s costs those who train with it.

    python -m benchmarks.unlike [--seconds 60] [--upload 10kB/s]

Three hosts in network namespaces: a monitor and a trainer; the same with a second trainer that is limited from its
start; and with one whose limit is set while it runs. Prints the epochs that the first trainer makes in that time, the
longest of them, and their ratio to what it makes alone. Each host is a computer of its own: its peers know none of the
others', and compute with one thread. What runs beside it on the machine counts: nothing should.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._homes import Internet, missing
from swarmcli.cli.processes import Children
from tests.end_to_end.swarm import RECIPE, Swarm

WARM_UP = 5  # epochs that are not counted
SIZE = {"n_layer: 1": "n_layer: 3", "n_embd: 32": "n_embd: 96"}  # 0.4 million parameters: a round sends 1.6 MB


def measure(directory: Path, seconds: float, upload: str | None, later: bool) -> tuple[int, float, float]:
    """Epochs of the first trainer in so many seconds, the longest and the usual one in seconds."""
    with Children() as children, Internet() as internet:
        recipe = RECIPE
        for small, larger in SIZE.items():
            recipe = recipe.replace(small, larger)
        run = Swarm(directory, children, max_epochs=100_000, target=256, host="0.0.0.0")
        run.recipe.write_text(recipe.format(max_epochs=100_000, target=256, host="0.0.0.0", rate=3e-3))
        hosts = {name: _host(internet, directory, name) for name in ("monitor", "quick", "slow")}
        run.start_contact("monitor", "monitor", "--web", "0", **hosts["monitor"])
        quick = run.start("join", "quick", **hosts["quick"])
        run.wait_for_epoch("quick", WARM_UP, quick)
        if upload is not None:
            words = [] if later else ["--limit", f"upload={upload}"]
            slow = run.start("join", "slow", *words, **hosts["slow"])
            if later:
                run.wait(lambda: any(each.own_samples for each in run.epochs("slow")), "the second one trains", slow)
                _config(directory, "slow").write_text(f"limits:\n  upload: {upload}\n")
        first = run.epoch("quick")
        time.sleep(seconds)
        epochs = [each.seconds for each in run.epochs("quick") if each.epoch > first]
        if upload is not None:
            for line in run.events("slow")[-6:]:
                print(f"      the slow one: {line.text}")
        return len(epochs), max(epochs, default=seconds), statistics.median(epochs or [seconds])


def _host(internet: Internet, directory: Path, name: str) -> dict[str, Any]:
    """How a peer is started there."""
    places = {"SWARM_RUNTIME_DIR": str(directory / f"{name}-runtime"), "SWARM_CONFIG": str(_config(directory, name))}
    return {"prefix": internet.machine(name).prefix, "environment": {**places, "OMP_NUM_THREADS": "1"}}


def _config(directory: Path, name: str) -> Path:
    return directory / f"{name}-config.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--upload", default="10kB/s")
    arguments = parser.parse_args()
    if (reason := missing()) is not None:
        sys.exit(reason)
    alone = 0
    for name, upload, later in (
        ("alone", None, False),
        ("limited from its start", arguments.upload, False),
        ("limited while it runs", arguments.upload, True),
    ):
        with tempfile.TemporaryDirectory() as directory:
            epochs, longest, usual = measure(Path(directory), arguments.seconds, upload, later)
        alone = alone or epochs
        print(
            f"{name:24} {epochs:4} epochs in {arguments.seconds:.0f} s, usual {usual:.2f} s, longest {longest:.1f} s, "
            f"{epochs / max(1, alone):.2f} of those alone",
            flush=True,
        )


if __name__ == "__main__":
    main()
