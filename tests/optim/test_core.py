"""What one call of step does: to its caller, to those who watch, when it is interrupted, and after a restart."""

import asyncio

import pytest
import torch

from swarmcli.errors import FingerprintError, OptimizerError
from swarmcli.events import EpochCredited, Noticed, StateDownloaded
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.modes.outer import LocalUpdates
from tests.optim.optim_swarm import TARGET, Swarm, adamw, digests, record, together, until
from tests.simulation import simulated, within
from tests.suites import soak


@simulated
async def test_a_step_that_only_accumulates_waits_for_no_one() -> None:
    async with Swarm(latency=0.5) as swarm:
        trainers = [await swarm.trainer(seed=1, pace=0.0) for _ in range(2)]
        for trainer in trainers:
            await trainer.core.join()
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(TARGET // 4 - 1):
            await trainers[0].compute()
        assert loop.time() == began
        assert trainers[0].core.tracker.local_progress.samples_accumulated == TARGET - 4


@simulated
async def test_an_epoch_tells_all_alike_who_gave_what_and_how_far_its_step_went() -> None:
    async with Swarm() as swarm:
        small, large = [await swarm.trainer(seed=1, batch_size=size, scheduler=lambda _: None) for size in (2, 6)]
        monitor = await swarm.trainer(seed=1, role="monitor", scheduler=lambda _: None)
        told = [record(peer.node, EpochCredited) for peer in (small, monitor)]
        small.core.metrics.note_loss(3.0, 2)
        small.core.metrics.note_loss(float("nan"), 2)
        small.core.metrics.note_loss(1.0, 6)
        await together(small.train(3), large.train(3), monitor.follow(3))
        for before, after in zip(small.epochs, small.epochs[1:], strict=False):
            assert after.epoch == before.epoch + 1
            assert after.lineage != before.lineage
        for mine, yours, theirs in zip(small.epochs, large.epochs, monitor.epochs, strict=True):
            assert mine.samples == yours.samples == mine.own_samples + yours.own_samples
            assert mine.lineage == yours.lineage
            assert mine.peers == yours.peers == 2
            assert 0 < mine.averaging_seconds < mine.seconds
            norms = mine.gradient_norm, mine.update_norm
            assert norms == (yours.gradient_norm, yours.update_norm) == (theirs.gradient_norm, theirs.update_norm)
        first = small.epochs[0]
        assert first.gradient_norm is not None and first.gradient_norm > 0
        assert first.update_norm == pytest.approx(0.02 * first.gradient_norm)  # the rate of `momentum`
        assert first.loss == pytest.approx(1.5)
        assert small.epochs[1].loss is None
        report = small.core.report()
        assert report.loss == pytest.approx(1.5)
        assert (report.epoch, report.last_outcome) == (3, "committed")
        assert report.samples == sum(event.own_samples for event in small.epochs)
        assert report.samples_seen == sum(event.samples for event in small.epochs)
        given = {peer.node.peer_id.text: sum(e.own_samples for e in peer.epochs) for peer in (small, large)}
        for credits in told:
            assert [credit.epoch for credit in credits] == [1, 2, 3]
            assert credits[-1].run_samples == sum(given.values())
            counted = {peer: sum(credit.samples[peer] for credit in credits) for peer in given}
            assert counted == given
            assert all(size > 0 for credit in credits for size in credit.reduced.values())
        assert [credit.samples for credit in told[0]] == [credit.samples for credit in told[1]]


@simulated
async def test_a_monitor_that_waits_for_the_first_trainer_does_not_count_that_as_an_epoch() -> None:
    async with Swarm() as swarm:
        monitor = await swarm.trainer(seed=1, role="monitor")

        async def come_later() -> None:
            await asyncio.sleep(600)
            trainer = await swarm.trainer(seed=1, pace=1.0)
            await trainer.train(3)
            assert monitor.epochs[0].seconds < trainer.epochs[0].seconds + 15, "reports are some seconds late"

        await together(monitor.follow(3), come_later())


@simulated
async def test_a_jump_of_the_gradient_is_told() -> None:
    async with Swarm() as swarm:
        trainer, monitor = await swarm.trainer(seed=1), await swarm.trainer(seed=1, role="monitor")
        told, to_owner = record(trainer.node, Noticed), record(monitor.node, Noticed)
        await together(trainer.train(8), monitor.follow(8))
        assert not any("far beyond" in notice.text for notice in told)
        trainer.data.manual_seed(5)
        with torch.no_grad():
            trainer.weights.mul_(1000)
        await together(trainer.train(9), monitor.follow(9))
        (mild,), (jump,) = ([notice for notice in each if "far beyond" in notice.text] for each in (told, to_owner))
        assert mild.level == "info" and "nothing for a volunteer to do" in mild.text
        assert jump.level == "warning"
        assert jump.text.startswith("the step to epoch 9 was far beyond the usual one: the norm of the averaged")


@pytest.mark.parametrize("delay", [0.035, *soak([0.005, 0.015, 0.025, 0.05, 0.08])])
@within(300)
async def test_an_interrupted_step_leaves_a_whole_state(delay: float) -> None:
    async with Swarm() as swarm:
        trainers = [await swarm.trainer(seed=1, make=adamw, batch_size=TARGET // 2) for _ in range(2)]
        interrupted, other = trainers

        async def interrupt() -> None:
            await interrupted.compute()
            while interrupted.epoch < 5:
                step = asyncio.ensure_future(interrupted.wait())
                await asyncio.sleep(delay)
                step.cancel()
                await asyncio.wait([step])
                if interrupted.core.tracker.local_progress.samples_accumulated == 0:
                    await interrupted.compute()

        await together(interrupt(), other.train(5))
        await together(*(trainer.train(7) for trainer in trainers))
        assert len(digests(trainers)) == 1
        assert len({trainer.core.position for trainer in trainers}) == 1


@within(300)
async def test_a_batch_from_before_the_epochs_end_does_not_count_for_the_next() -> None:
    async with Swarm() as swarm:
        trainers = [await swarm.trainer(seed=1, batch_size=TARGET // 2) for _ in range(2)]
        interrupted, other = trainers
        for trainer in trainers:
            await trainer.core.join()
        await interrupted.compute()
        ending = asyncio.ensure_future(other.train(1))
        await until(lambda: interrupted.core.is_averaging)
        step = asyncio.ensure_future(interrupted.core.step(0))
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.wait([step])
        assert interrupted.epoch == 0
        assert await interrupted.core.step(TARGET // 2), "this batch's gradients are those of epoch 0"
        await ending
        assert interrupted.epoch == 1
        assert interrupted.core.work.samples == 0


@simulated
async def test_the_users_gradients_are_left_as_they_were() -> None:
    async with Swarm() as swarm:
        trainer = await swarm.trainer(seed=1, batch_size=TARGET)
        await trainer.core.join()
        trainer.weights.grad = torch.ones_like(trainer.weights)
        users = trainer.weights.grad
        assert await trainer.core.step(TARGET)
        assert trainer.weights.grad is users
        assert torch.equal(users, torch.ones_like(users))


@within(300)
async def test_a_checkpoint_that_is_further_than_the_run_leads_it() -> None:
    async with Swarm() as swarm:
        veteran = await swarm.trainer(seed=1)
        await veteran.train(5)
        saved, weights = await veteran.core.state_dict(), veteran.weights.detach().clone()
        await veteran.core.shutdown()
        beginner = await swarm.trainer(seed=2)
        downloads = record(beginner.node, StateDownloaded)
        await beginner.train(2)
        back = await swarm.trainer(seed=3)
        with torch.no_grad():
            back.weights.copy_(weights)
        await back.core.load_state_dict(saved)
        await together(beginner.train(8), back.train(8))
        assert [download.epoch >= 5 for download in downloads] == [True]
        assert [event.epoch for event in back.epochs if event.samples == 0] == []
        assert len(digests([beginner, back])) == 1


@within(300)
async def test_all_refusing_it_the_newcomer_gets_the_keys() -> None:
    async with Swarm() as swarm:
        ours = await swarm.trainer(seed=1, fingerprint={"seed": "1", "task": "a"})
        theirs = await swarm.trainer(seed=1, fingerprint={"seed": "2", "task": "a"})
        await ours.core.join()
        with pytest.raises(FingerprintError) as caught:
            await theirs.follow(1)
        assert caught.value.keys == ("seed",)
        assert ours.epoch == 0


@pytest.mark.parametrize("mode", [Mode(), LocalUpdates()], ids=["synchronous", "local updates"])
@within(60)
async def test_an_optimizer_whose_statistics_cannot_travel_is_refused_in_the_step_that_was_its_first(
    mode: Mode,
) -> None:
    class Factored(torch.optim.SGD):
        def step(self, closure=None) -> None:
            super().step()
            self.state[self.param_groups[0]["params"][0]]["factors"] = [torch.zeros(2)]

    async with Swarm() as swarm:
        trainer = await swarm.trainer(make=lambda params: Factored(params, lr=0.1), mode=mode)
        with pytest.raises(OptimizerError, match=r"Factored cannot train with others.*'factors' of parameter 0"):
            await trainer.train(1)
        await asyncio.sleep(0)
        asyncio.get_running_loop().faults.clear()  # the end of the epoch is logged as well
