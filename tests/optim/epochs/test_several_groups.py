"""Several groups end one epoch side by side, and the averaging of states keeps them together."""

import pytest
import torch

from swarmcli.events import RoundFinished, StateDownloaded
from swarmcli.network import virtual_time
from swarmcli.optim.epochs.epoch_rule import LEFT_BEHIND, SeveralGroups
from swarmcli.optim.modes import Modes
from tests.optim.optim_swarm import Swarm, Trainer, make_model, record, together

EPOCHS, SIZE = 8, 3


async def grouped(swarm: Swarm, count: int) -> list[Trainer]:
    """Trainers that average in groups of at most SIZE; an epoch takes them some seconds."""
    options = {"batch_size": 2, "target": 240, "matchmaking_time": 5.0}
    modes = Modes(several_groups=True)
    averaging = {"target_group_size": SIZE}
    return [await swarm.trainer(seed=1, modes=modes, averaging=averaging, **options) for _ in range(count)]


def distance(trainer: Trainer) -> float:
    """To the truth, which is a vector of ones."""
    return (trainer.weights.detach() - 1).norm().item()


@pytest.mark.parametrize("count", [6, 7])
def test_groups_train_side_by_side_also_with_one_left_over(count: int) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainers = await grouped(swarm, count)
            rounds = [record(trainer.node, RoundFinished) for trainer in trainers]
            downloads = [record(trainer.node, StateDownloaded) for trainer in trainers]
            await together(*(trainer.train(EPOCHS) for trainer in trainers))
            assert not any(downloads)  # another group being a moment earlier makes nobody start over
            gradients = [[r for r in seen if r.purpose == "run_grads" and r.members] for seen in rounds]
            assert max(len(r.members) for seen in gradients for r in seen) <= SIZE
            assert sum(len(seen) for seen in gradients) > 0.6 * EPOCHS * len(trainers)
            start = (make_model(1).detach() - 1).norm().item()
            assert max(distance(trainer) for trainer in trainers) < start
            weights = torch.stack([trainer.weights.detach() for trainer in trainers])
            assert (weights - weights.mean(0)).norm(dim=1).max() < 0.5 * weights.mean(0).norm()

    virtual_time.run(main(), timeout=300)


class Reports:
    """A tracker as the rule sees it."""

    target_batch_size = 10

    def __init__(self) -> None:
        self.global_epoch = 0
        self.accumulated_enough_samples = False
        self.local_progress = self
        self.epoch = 0


def test_the_leader_hears_of_the_target_when_the_reports_suffice() -> None:
    reports, moment = Reports(), [0.0]
    rule = SeveralGroups(reports, patience=5.0, now=lambda: moment[0])  # type: ignore[arg-type]
    assert rule.told(9) == 0.0
    reports.accumulated_enough_samples = True
    assert rule.told(1) == 10
    assert not rule.suffices(1)
    moment[0] = 5.0
    assert rule.suffices(1)  # nobody has come
    reports.epoch = reports.global_epoch = 1
    reports.accumulated_enough_samples = False
    assert rule.told(1) == 0.0
    assert not rule.suffices(1)


def test_whoever_is_left_behind_looks_for_others_for_a_moment_only() -> None:
    reports, moment = Reports(), [0.0]
    rule = SeveralGroups(reports, patience=5.0, now=lambda: moment[0])  # type: ignore[arg-type]
    reports.global_epoch = 1
    assert rule.told(0) == 10
    moment[0] = LEFT_BEHIND
    assert rule.suffices(4)
    assert rule.excuses(1)
    assert not rule.excuses(2)
