"""Who waits for the end of an epoch, for what of it, and who learns of its errors."""

import asyncio

import pytest

from swarmcli.network import virtual_time
from swarmcli.network.tasks import TaskOwner
from swarmcli.optim.epochs.under_way import EndUnderWay, Resume


def lasting(before: float, after: float, error: Exception | None = None):
    """An end in which the trainer waits `before` seconds, and which goes on for `after` more."""

    async def run(resume: Resume) -> None:
        await asyncio.sleep(before)
        resume()
        await asyncio.sleep(after)
        if error is not None:
            raise error

    return run


def seconds() -> float:
    return asyncio.get_running_loop().time()


def test_the_trainer_waits_for_its_part_and_the_rest_goes_on() -> None:
    async def main() -> None:
        end, began = EndUnderWay(TaskOwner()), seconds()
        assert not end
        end.begin(lasting(1, 2))
        await end.may_compute()
        assert (seconds() - began, bool(end)) == (1, True)
        await end.may_compute()
        assert seconds() - began == 1
        await end.over()
        assert (seconds() - began, bool(end)) == (3, False)
        await end.may_compute()
        await end.over()
        assert seconds() - began == 3

    virtual_time.run(main())


@pytest.mark.parametrize("wait", [EndUnderWay.may_compute, EndUnderWay.over])
def test_an_error_of_the_background_is_raised_once_to_whoever_waits_next(wait) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        end = EndUnderWay(TaskOwner())
        end.begin(lasting(0, 1, OSError("disk full")))
        await end.may_compute()
        await asyncio.sleep(2)
        with pytest.raises(OSError, match="disk full"):
            await wait(end)
        assert not end
        await wait(end)

    virtual_time.run(main())


def test_an_error_before_the_trainer_may_go_on_reaches_it_at_once() -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        end = EndUnderWay(TaskOwner())

        async def run(resume: Resume) -> None:
            raise OSError("disk full")

        end.begin(run)
        with pytest.raises(OSError, match="disk full"):
            await end.may_compute()

    virtual_time.run(main())


@pytest.mark.parametrize("wait", [EndUnderWay.may_compute, EndUnderWay.over])
def test_it_goes_on_when_somebody_stops_waiting(wait) -> None:
    async def main() -> None:
        end, began = EndUnderWay(TaskOwner()), seconds()
        end.begin(lasting(3, 0))
        waiting = asyncio.get_running_loop().create_task(wait(end))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert end
        await end.over()
        assert seconds() - began == 3

    virtual_time.run(main())


def test_the_end_of_its_owner_lets_those_go_who_wait() -> None:
    async def main() -> None:
        tasks = TaskOwner()
        end = EndUnderWay(tasks)
        end.begin(lasting(3, 0))
        waiting = asyncio.get_running_loop().create_task(end.may_compute())
        await asyncio.sleep(1)
        await tasks.close()
        await asyncio.wait([waiting], timeout=1)
        assert waiting.done()

    virtual_time.run(main())
