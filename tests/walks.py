"""How far a reader walks: `python tests/walks.py` counts the files and functions that five deeds of a user pass.

It counts every function of `swarmcli` and `coordinator_web` that is called meanwhile, in threads that begin meanwhile
too, and the files in which these stand. To compare two trees, run this file in each.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

ROOT = Path(__file__).parent.parent


class Walk:
    """Counts while its block lasts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._codes: set[CodeType] = set()

    def __enter__(self) -> Walk:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._codes.add(frame.f_code)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        places = [str(ROOT / folder) for folder in ("swarmcli", "coordinator_web")]
        ours = {code for code in self._codes if code.co_filename.startswith(tuple(places))}
        named = {code for code in ours if not code.co_name.startswith("<")}
        print(f"{self._name:<45}{len({code.co_filename for code in ours}):>5} files{len(named):>6} functions")


def epoch() -> None:
    from swarmcli.testing.virtual_time import run
    from tests.optim.optim_swarm import Swarm, together

    async def story() -> None:
        async with Swarm(3) as swarm:
            trainers = [await swarm.trainer(seed=1, batch_size=1, pace=0.1) for _ in range(2)]
            await together(*(trainer.core.join() for trainer in trainers))
            await together(*(trainer.train(2) for trainer in trainers))
            with Walk("a step that ends an epoch"):
                await together(*(trainer.train(3) for trainer in trainers))

    run(story())


def store() -> None:
    from swarmcli.testing.virtual_time import run
    from tests.dht.swarm import Swarm as Nodes

    async def story() -> None:
        async with Nodes() as swarm:
            first, *_ = await swarm.grow(8)
            with Walk("a store in the hash table"):
                await first.store("key", 1, first.endpoint.clock.now() + 60.0)

    run(story())


def averaging() -> None:
    from swarmcli.testing.virtual_time import run
    from tests.averaging.averagers import Averagers, all_results

    async def story() -> None:
        async with Averagers(3) as swarm:
            peers = await swarm.add(4)
            await asyncio.sleep(5)
            with Walk("a round of four"):
                await all_results([peer.begin(timeout=30.0) for peer in peers])

    run(story())


def journal() -> None:
    from swarmcli.events import Events
    from swarmcli.journal import Journal, RunRecord

    with tempfile.TemporaryDirectory() as place:
        written = Journal(
            Path(place) / "journal.db", run=RunRecord("run", "trainer", "a" * 52, "me", "0"), clock=time.time
        )
        events = Events()
        written.listen(events)
        source = _source(written)
        with Walk("an event to its row and its JSON"):
            events.emit(_round())
            written.flush(5.0)
            source.rounds(limit=10)
        written.close("done")


def _round() -> Any:
    from swarmcli.events import RoundFinished

    values: dict[str, Any] = {
        "round_id": "ab" * 16, "purpose": "gradients", "epoch": 1, "outcome": "committed", "reason": "", "leader": "a",
        "members": ("a" * 52,), "contributors": ("a" * 52,), "left_out": {}, "bytes_sent": 1, "bytes_received": 1,
        "seconds": {"averaging": 1.0},
    }  # fmt: skip
    return RoundFinished(**{key: value for key, value in values.items() if key in RoundFinished.__dataclass_fields__})


def _source(written: Any) -> Any:
    from swarmcli.run.source import DashboardSource, Providers

    return DashboardSource(written, cast(Any, None), Providers())


class _Enough(BaseException):
    """The first step was taken."""


def join() -> None:
    from swarmcli.training.loop import TrainingLoop

    first: Callable[..., Any] = TrainingLoop.run

    def stop(*_: Any, **__: Any) -> Any:
        raise _Enough

    TrainingLoop.run = stop  # type: ignore[method-assign]
    from swarmcli.cli.main import main

    with tempfile.TemporaryDirectory() as place, contextlib.suppress(_Enough):
        sys.argv = ["swarm", "join", str(ROOT / "recipes/stdlib-lm.yaml"), "--set", f"output_dir={place}", "--yes"]
        with Walk("swarm join RECIPE up to the first step"):
            main()
    TrainingLoop.run = first  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for walk in [globals()[name] for name in sys.argv[1:]] or [epoch, store, averaging, journal, join]:
        walk()
