"""How many files of optim/ a default step that ends an epoch passes: whoever wants to know what it does reads them."""

import sys
import threading
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

import swarmcli.optim
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, Trainer, together

MOST = 25  # docs/architecture.md names each; with them goes optimizer.py, in the user's thread
OPTIM = Path(swarmcli.optim.__file__).parent


def test_a_step_that_ends_an_epoch_passes_few_files() -> None:
    stepping: ContextVar[bool] = ContextVar("stepping", default=False)  # tasks that a step begins inherit it
    passed: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        on_loop = threading.current_thread() is threading.main_thread()
        if event == "call" and (stepping.get() or not on_loop):  # other threads only work for the loop
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(OPTIM):
                passed[str(path.relative_to(OPTIM))] = None

    async def watched(trainer: Trainer) -> None:
        await trainer.compute()
        stepping.set(True)
        await trainer.compute()

    async def main() -> None:
        async with Swarm(latency=0.01) as swarm:
            trainers = [await swarm.trainer(seed=1, pace=2.0, target=16) for _ in range(2)]
            await together(*(trainer.core.join() for trainer in trainers))
            await together(*(trainer.train(4) for trainer in trainers))
            before = sys.getprofile()
            sys.setprofile(note)
            try:
                await together(watched(trainers[0]), trainers[1].train(5))
            finally:
                sys.setprofile(before)
            assert trainers[0].epoch == 5

    virtual_time.run(main(), timeout=600)
    assert len(passed) <= MOST, f"{len(passed)} files: {', '.join(passed)}"
