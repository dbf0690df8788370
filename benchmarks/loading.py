"""How long a device waits for its data: text, and images of 224 pixels, read and collated ahead, beside a reader that
makes each batch when it is wanted.

The device is a stand-in that is busy for a given time with each batch and needs no processor meanwhile, as a graphics
card would be: the times are those of cards for such batches, and half of them.

    python -m benchmarks.loading
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swarmcli.recipe import Recipe, parse_recipe
from swarmcli.training import build_task
from swarmcli.training.stream import RememberedStream

BATCHES = 60
AHEAD = 2  # as LoopSettings has it


@dataclass(frozen=True)
class Case:
    name: str
    recipe: str
    seconds: float  # that the device computes for each batch


TEXT = """\
run_id: loading
base_model: {model_type: gpt2}
datasets: [{source: stdlib}]
sequence_len: 1024
target_batch_size: 512
micro_batch_size: 8
"""
IMAGES = """\
run_id: loading
task: image_classification
base_model: {model_type: vit}
labels: [one, two]
datasets: [{path: imagefolder, data_files: ["images/**"], streaming: false}]
target_batch_size: 512
micro_batch_size: 32
"""
# An A100 trains GPT-2 small with about 100,000 tokens a second, a T4 with 12,000; ViT-B/16 with 700 and 90 images.
CASES = [
    Case("text of 1,024 bytes, 8 a batch, as an A100", TEXT, 0.08),
    Case("the same twice as fast", TEXT, 0.04),
    Case("images, 32 a batch, as a T4", IMAGES, 0.36),
    Case("images, 32 a batch, as an A100", IMAGES, 0.046),
]


def waited(recipe: Recipe, seconds: float, ahead: int) -> float:
    """The share of its time in which the device waits."""
    stream = RememberedStream(build_task(recipe), 1, ahead=ahead)
    stream.next()
    begin, waits = time.perf_counter(), 0.0
    for _ in range(BATCHES):
        asked = time.perf_counter()
        assert stream.next() is not None
        waits += time.perf_counter() - asked
        time.sleep(seconds)
    share = waits / (time.perf_counter() - begin)
    stream.close()
    return share


def images(directory: Path) -> Iterator[Path]:
    """Photographs of the usual size: JPEG, 500 by 375 pixels."""
    from PIL import Image

    rng = np.random.default_rng(1)
    for number in range(256):
        low = Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8))
        file = directory / ("one", "two")[number % 2] / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        low.resize((500, 375), Image.Resampling.BICUBIC).save(file, quality=90)
        yield file


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        made = sum(1 for _ in images(Path(place) / "images"))
        print(f"{made} images; share of its time in which the device waits for data")
        print(f"{'':45} {'ahead':>8} {'each when wanted':>18}")
        for case in CASES:
            recipe = parse_recipe(case.recipe, name="loading.yaml", directory=place)
            ahead, wanted = (waited(recipe, case.seconds, count) for count in (AHEAD, 0))
            print(f"{case.name:45} {ahead:8.1%} {wanted:18.1%}", flush=True)


if __name__ == "__main__":
    main()
