"""How long a device waits for its data: text, and images of 224 pixels, read and collated ahead, by as many threads as
there are processors and by one, beside a reader that makes each batch when it is wanted, and torch's DataLoader with as
many processes.

The device is a stand-in that is busy for a given time with each batch and needs no processor meanwhile, as a graphics
card would be: the times are those of cards for such batches, and half of them.

    python -m benchmarks.loading
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from swarmcli.recipe import Recipe, parse_recipe
from swarmcli.training import build_task
from swarmcli.training.stream import RememberedStream

BATCHES = 20
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
    Case("the same, by a device that takes no time", IMAGES, 0.0),
    Case("photographs of 12 megapixels, likewise", IMAGES.replace("images/", "photographs/"), 0.0),
]


def read(recipe: Recipe, seconds: float, ahead: int, threads: int) -> str:
    """The share of its time in which the device waits, and batches a second."""
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)  # a task decodes on as many
    stream = RememberedStream(build_task(recipe), 1, ahead=ahead)
    found = measured(stream.next, seconds)
    stream.close()
    torch.set_num_threads(usual)
    return found


def measured(take: Callable[[], Any], seconds: float) -> str:
    take()
    begin, waits = time.perf_counter(), 0.0
    for _ in range(BATCHES):
        asked = time.perf_counter()
        assert take() is not None
        waits += time.perf_counter() - asked
        time.sleep(seconds)
    took = time.perf_counter() - begin
    return f"{waits / took:.1%} {BATCHES / took:5.1f}/s"


class Photographs:
    """The same images for torch's DataLoader, without end."""

    def __init__(self, task: Any, files: list[Path]) -> None:
        self.task, self.files = task, files

    def __len__(self) -> int:
        return 32 * 2 * BATCHES

    def __getitem__(self, number: int) -> Any:
        from PIL import Image

        file = self.files[number % len(self.files)]
        return self.task.encode({"image": Image.open(file), "label": file.parent.name})


def by_torch(recipe: Recipe, seconds: float, files: list[Path], processes: int) -> str:
    task: Any = build_task(recipe)
    task.maker(recipe.datasets)
    loader = DataLoader(Photographs(task, files), 32, shuffle=True, num_workers=processes, collate_fn=task.collate)  # type: ignore[arg-type,var-annotated]
    batches = iter(loader)
    return measured(lambda: next(batches), seconds)


def images(directory: Path, files: int, width: int) -> Iterator[Path]:
    """Photographs: JPEG, four by three."""
    from PIL import Image

    rng = np.random.default_rng(1)
    for number in range(files):
        low = Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8))
        file = directory / ("one", "two")[number % 2] / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        low.resize((width, width * 3 // 4), Image.Resampling.BICUBIC).save(file, quality=90)
        yield file


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        kinds = {"images/": list(images(Path(place) / "images", 256, 500))}
        kinds["photographs/"] = list(images(Path(place) / "photographs", 32, 4000))
        threads = torch.get_num_threads()
        print(f"the share of its time in which the device waits, and batches a second; {threads} threads")
        print(f"{'':42} {'ahead':>16} {'by one thread':>16} {'when wanted':>16} {'DataLoader':>16}")
        for case in CASES:
            recipe = parse_recipe(case.recipe, name="loading.yaml", directory=place)
            found = [read(recipe, case.seconds, *how) for how in ((AHEAD, threads), (AHEAD, 1), (0, 1))]
            found += [by_torch(recipe, case.seconds, kinds[kind], threads) for kind in kinds if kind in case.recipe]
            print(f"{case.name:42} " + " ".join(f"{each:>16}" for each in found), flush=True)


if __name__ == "__main__":
    main()
