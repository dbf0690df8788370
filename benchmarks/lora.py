"""LoRA beside full gradients over home links: three volunteers, each behind a link of its own in a network namespace,
train a causal model of 114 million parameters with random weights.

    python -m benchmarks.lora [--mbit 10]

Both runs read the same data with the same batches. The model lies on each computer. They find each other over fast
links, so that nobody waits for a state; then the links are slowed down and rounds are counted. Full gradients travel in
8 bits; in float32 they are four times as much.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from benchmarks import _homes as homes
from benchmarks.shared_machine import until
from swarmcli.cli.processes import Children
from swarmcli.errors import JournalError
from swarmcli.events import RoundFinished
from swarmcli.journal import JOURNAL_NAME, JournalReader
from swarmcli.recipe import load_recipe
from swarmcli.training import Compute, build_task
from swarmcli.training.demand import demand_of

VOLUNTEERS = 3
FAST = 2000.0  # Mbit/s, until all are there
PATIENCE = 1500.0  # seconds for one run
RECIPE = """
run_id: {name}
base_model: {base}
tokenizer: bytes
datasets: [{{source: stdlib}}]
sequence_len: 32
target_batch_size: 12
local: {{micro_batch_size: 2}}
averaging: {{averaging_timeout: 900}}
optimizer: {{name: adamw, learning_rate: 1e-4}}
"""
KINDS = {
    "LoRA, r = 8, float32": (5, "adapter: lora\nlora_r: 8\nlora_target_modules: [c_attn]\n"),
    "full gradients, 8 bits": (2, "compression: {gradients: blockwise_8bit}\n"),
}


@dataclass(frozen=True)
class Measured:
    seconds: float  # from the end of one round to that of the next
    round: float  # of them, while the round ran
    sent: float  # bytes of a volunteer in a round
    received: float


def make_base(directory: Path) -> int:
    """Saves the model; returns how many parameters it has."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=259, n_positions=64, n_embd=768, n_layer=16, n_head=12, bos_token_id=258, eos_token_id=258
    )
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(name: str, file: Path, epochs: int, directory: Path, mbit: float) -> Measured:
    """Measures `epochs` rounds of all three volunteers over the slow links, without the first one: medians of seconds,
    means of bytes."""
    with homes.Internet() as internet, Children() as children:
        places = [directory / f"{name}-{index}" for index in range(VOLUNTEERS)]
        started, contact, machines = [], list[str](), list[homes.Machine]()

        def rounds(place: Path, since: float = 0.0) -> list[RoundFinished]:
            try:
                with JournalReader(place / JOURNAL_NAME) as journal:
                    found = journal.rounds(name)
            except JournalError:
                return []
            committed = [each for each in found if each.outcome == "committed" and each.time - each.duration > since]
            return sorted((e for e in committed if len(e.contributors) == VOLUNTEERS), key=lambda each: each.time)

        for index, place in enumerate(places):
            machines.append(machine := internet.machine(f"volunteer{index}", mbit=FAST))
            words = ["join", str(file), "--home", str(place), "--host", machine.address, "--yes", *contact]
            environment = {"SWARM_RUNTIME_DIR": f"{directory}/{name}-runtime{index}", "OMP_NUM_THREADS": "1"}
            started.append(
                children.start(f"{name}{index}", words, place.with_suffix(".log"), environment, prefix=machine.prefix)
            )
            until(lambda place=place: (place / "peer.json").exists(), patience=300)
            contact = contact or ["--peer", json.loads((place / "peer.json").read_text())["addresses"][0]]
        until(lambda: all(len(rounds(place)) > 1 for place in places), patience=PATIENCE)
        for machine in machines:
            machine.site.shape(mbit)
        slowed = time.time()
        until(lambda: all(len(rounds(place, slowed)) > epochs for place in places), patience=PATIENCE)
        every = [each for place in places for each in rounds(place, slowed)[1 : epochs + 1]]
        ends = [each.time for each in rounds(places[0], slowed)[: epochs + 1]]
        for child in started:
            child.kill()
    return Measured(
        statistics.median(later - sooner for sooner, later in itertools.pairwise(ends)),
        statistics.median(each.duration for each in every),
        statistics.fmean(each.bytes_sent for each in every),
        statistics.fmean(each.bytes_received for each in every),
    )


def digest_of(recipe: str, directory: Path) -> str:
    """The digest that the recipe has to name, as `swarm validate` tells it."""
    file = directory / "unnamed.yaml"
    file.write_text(recipe)
    words = [sys.executable, "-m", "swarmcli", "validate", str(file)]
    said = subprocess.run(words, capture_output=True, text=True)
    return re.findall("frozen_weights: ([0-9a-f]{64})", said.stdout + said.stderr)[0]


def main() -> None:
    if missing := homes.missing():
        print(f"not measured: {missing}")
        return
    mbit = float(sys.argv[sys.argv.index("--mbit") + 1]) if "--mbit" in sys.argv else 10.0
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        parameters = make_base(directory / "base")
        print(f"{parameters:,} parameters, {VOLUNTEERS} volunteers, {mbit:g} Mbit/s each way")
        print(
            "| each round | epochs an hour | an epoch, of it a round | a volunteer sends | and receives | state, base |"
        )
        print("| --- | --- | --- | --- | --- | --- |")
        for number, (kind, (epochs, more)) in enumerate(KINDS.items()):
            text = RECIPE.format(name=f"run{number}", base=directory / "base") + more
            if "adapter" in more:
                text += f"frozen_weights: {digest_of(text, directory)}\n"
            file = directory / f"run{number}.yaml"
            file.write_text(text)
            recipe = load_recipe(file)
            outline = build_task(recipe).build_model(outline=True)
            first = demand_of(recipe, outline, "trainer", Compute(torch.device("cpu")))
            each = measure(f"run{number}", file, epochs, directory, mbit)
            print(
                f"| {kind} | {3600 / each.seconds:,.1f} | {each.seconds:.1f} s, {each.round:.1f} s "
                f"| {each.sent / 1e6:,.2f} MB | {each.received / 1e6:,.2f} MB "
                f"| {first.state / 1e6:,.1f} MB, {first.frozen / 1e6:,.1f} MB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
