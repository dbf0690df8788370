"""The memory that `swarm validate` says a trainer needs, beside the peak of one from which another downloads a state.

The peak is what the kernel counts as resident at most (VmHWM), on the processor. It includes the pages of mapped files
that were read: those of programs, and those of kept rounds, which a peer reads that comes late.

    python -m benchmarks.memory
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import torch
import transformers

from benchmarks.shared_machine import until
from swarmcli.cli.processes import Children
from swarmcli.errors import JournalError
from swarmcli.journal import JOURNAL_NAME, JournalReader
from swarmcli.recipe import load_recipe
from swarmcli.shipped.make_data import main as make_data
from swarmcli.training import Compute, build_task
from swarmcli.training.memory import memory_needs

MIB = 1 << 20
COMMON = """
run_id: memory
target_batch_size: 32
local: {micro_batch_size: 4, host: 127.0.0.1, threads: 1}
checkpoint: {every_epochs: 0}
optimizer: {name: adamw, learning_rate: 1e-4}
"""
TEXT = "tokenizer: bytes\ndatasets: [{source: stdlib}]\nsequence_len: 128\nbase_model: "
LORA = TEXT + "base\nadapter: lora\nlora_r: 8\nlora_target_modules: "
IMAGES = """
task: image_classification
labels: [circle, square, triangle]
datasets: [{path: imagefolder, data_files: ['data/shapes/**'], streaming: false}]
base_model: {model_type: vit, image_size: 96, hidden_size: 384, num_attention_heads: 6, intermediate_size: 1536}
"""
KINDS = {
    "GPT-2 of 25 million, all trained": (TEXT + "{model_type: gpt2, n_layer: 8, n_embd: 512, n_head: 8}\n", "bfloat16"),
    "GPT-2 of 124 million, LoRA at one matrix of a layer": (LORA + "[c_attn]\n", "bfloat16"),
    "the same, at every matrix": (LORA + "all-linear\n", "bfloat16"),
    "the same, at one matrix, the base in float32": (LORA + "[c_attn]\n", "float32"),
    "ViT of 21 million, all trained": (IMAGES, "bfloat16"),
}


def write_recipe(text: str, base_dtype: str, directory: Path) -> Path:
    """Writes a recipe and the files that it needs, with the digest of its frozen weights as `swarm validate` tells
    it."""
    file = directory / "recipe.yaml"
    text = COMMON.replace("threads", f"base_dtype: {base_dtype}, threads") + text
    file.write_text(text)
    if "imagefolder" in text:
        make_data(directory / "data", ["shapes"])
    if "adapter" in text:
        torch.manual_seed(1)
        transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(directory / "base")
        words = [sys.executable, "-m", "swarmcli", "validate", str(file)]
        said = subprocess.run(words, capture_output=True, text=True)
        digest = re.findall("frozen_weights: ([0-9a-f]{64})", said.stdout + said.stderr)[0]
        file.write_text(f"{text}frozen_weights: {digest}\n")
    return file


def peak(file: Path, directory: Path) -> tuple[int, int]:
    """Returns the most bytes that a trainer had resident, and how many of them were pages of files at that moment."""
    first, second = directory / "first", directory / "second"
    over, highest = threading.Event(), [(0, 0)]

    def epochs(home: Path) -> int:
        with suppress(JournalError), JournalReader(home / JOURNAL_NAME) as journal:
            return len(journal.epochs("memory"))
        return 0

    with Children() as children:

        def start(home: Path, *more: str) -> int:
            words = ["join", str(file), "--home", str(home), "--yes", *more]
            return children.start(
                home.name, words, home.with_suffix(".log"), {"SWARM_RUNTIME_DIR": f"{directory}/runtime"}
            ).pid

        def watch(process: int) -> None:
            while not over.wait(0.02):
                told = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
                if (most := _nbytes(told["VmHWM"])) > highest[-1][0]:
                    highest.append((most, _nbytes(told["RssFile"])))

        process = start(first)
        watcher = threading.Thread(target=watch, args=(process,))
        watcher.start()
        until(lambda: epochs(first) >= 3, patience=300)
        start(second, "--peer", json.loads((first / "peer.json").read_text())["addresses"][0])
        until(lambda: epochs(second) >= 3, patience=300)
        over.set()
        watcher.join()
    return highest[-1]


def _nbytes(told: str) -> int:
    return int(told.split()[0]) * 1024


def main() -> None:
    print("| | said, MiB | peak, MiB | peak / said | pages of files in the peak, MiB |")
    print("| --- | --- | --- | --- | --- |")
    for name, (text, base_dtype) in KINDS.items():
        with tempfile.TemporaryDirectory() as place:
            file = write_recipe(text, base_dtype, Path(place))
            recipe = load_recipe(file)
            outline = build_task(recipe).build_model(outline=True)
            needs = memory_needs(recipe, outline, "trainer", Compute(torch.device("cpu")))
            said, (most, of_files) = sum(need.nbytes for need in needs), peak(file, Path(place))
            print(
                f"| {name} | {said / MIB:,.0f} | {most / MIB:,.0f} | {most / said:.2f} | {of_files / MIB:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
