"""PowerSGDGradientAverager and PowerEFGradientAverager between peers over TCP, in the users' own threads."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.dht import DHT
from swarmcli.optim import PowerEFGradientAverager, PowerSGDGradientAverager
from swarmcli.optim.gradients.low_rank_averagers import LowRankGradientAverager
from swarmcli.optim.modes import choose_mode
from tests.optim.gradients.low_rank_peers import gradient_of
from tests.optim.shells import at_once, dhts

KINDS = [PowerSGDGradientAverager, PowerEFGradientAverager]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["powersgd", "poweref"])


class Local:
    """A matrix and a bias with an averager."""

    def __init__(self, kind: type[LowRankGradientAverager], dht, **options) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((12, 10), (10,))]
        settings = {"min_matchmaking_time": 10.0, "min_compression_ratio": 0.1, **options}
        self.averager = kind(self.parameters, 2, dht=dht, prefix="grads", **settings)

    def accumulate(self, seed: int, samples: int) -> None:
        for index, parameter in enumerate(self.parameters):
            parameter.grad = gradient_of(10 * seed + index, parameter.shape)
        self.averager.accumulate_grads_(samples)

    def step(self):
        return self.averager.step(timeout=120)

    def averaged(self) -> list[torch.Tensor]:
        with self.averager.use_averaged_gradients():
            return [parameter.grad.clone() for parameter in self.parameters]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def wait_until_declared(dht, key: str) -> None:
    while True:
        found = dht.get(key, latest=True)
        if found is not None and any(getattr(subkey, "owner", None) == dht.peer_id for subkey in found.value):
            return


@kinds
def test_two_average_and_a_third_joins_them(kind: type[LowRankGradientAverager]) -> None:
    with dhts(3) as (first, second, third):
        one, other = Local(kind, first), Local(kind, second)
        with one.averager, other.averager:
            for seed in (0, 1):
                one.accumulate(seed, 1)
                other.accumulate(seed + 5, 3)
                results = at_once(one.step, other.step)
                assert all(isinstance(result, RoundResult) and result.total_weight == 4 for result in results)
                assert one.averager.local_samples_accumulated == 0
                got = one.averaged()
                assert equal(got, other.averaged())
                expected = (gradient_of(10 * seed + 1, (10,)) + 3 * gradient_of(10 * seed + 51, (10,))) / 4
                torch.testing.assert_close(got[1], expected)
            newcomer = Local(kind, third)
            with newcomer.averager:
                members = [one, other, newcomer]
                for seed in range(20, 40, 3):  # the first two may begin without it, and it follows at its next step
                    for index, member in enumerate(members):
                        member.accumulate(seed + index, 2)
                    control = newcomer.averager.schedule_step(timeout=120)
                    wait_until_declared(third, "grads.0b")
                    results = at_once(one.step, other.step, partial(newcomer.averager.step, control=control))
                    if all(result is not None and len(result.contributors) == 3 for result in results):
                        break
                assert {len(result.contributors) for result in results if result is not None} == {3}
                assert len({result.total_weight for result in results if result is not None}) == 1
                averages = [member.averaged() for member in members]
                assert equal(averages[0], averages[1]) and equal(averages[0], averages[2])
                shared = [dict(member.averager._method.shared) for member in members]
                assert all(torch.equal(shared[0][name], shared[2][name]) for name in shared[0])


def test_one_that_was_left_behind_notices_and_follows() -> None:
    with dhts(3) as (first, second, third):
        # They wait so long for the one that is late.
        one, other, late = (
            Local(PowerEFGradientAverager, dht, min_matchmaking_time=3.0) for dht in (first, second, third)
        )
        with one.averager, other.averager, late.averager:
            for index, member in enumerate((one, other, late)):
                member.accumulate(index, 2)
            at_once(one.step, other.step)
            look, late.averager._others_are_further = late.averager._others_are_further, lambda: False
            control = late.averager.schedule_step(timeout=300)  # as if they had their first round only now
            late.averager._others_are_further = look
            assert late.averager.step(control=control) is None
            assert late.averager.local_samples_accumulated == 2
            late.averager.load_state_from_peers()
            assert late.averager._tag == one.averager._tag != b""
            shared = [dict(member.averager._method.shared) for member in (one, late)]
            assert all(torch.equal(shared[0][name], shared[1][name]) for name in shared[0])


def test_impossible_options_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="averager_rank"):
        choose_mode(PowerSGDGradientAverager.get_factory(averager_rank=0))
    with dhts(1) as (only,), pytest.raises(ValueError, match="averaging_alpha"):
        Local(PowerEFGradientAverager, only, averaging_alpha=0.5)


def test_a_state_that_does_not_fit_is_not_taken(dht: DHT, caplog: pytest.LogCaptureFixture) -> None:
    one = Local(PowerEFGradientAverager, dht, start=False)
    own = [each.clone() for each in one.averager._method.shared.values()]
    good = [torch.ones_like(each) for each in own]
    for metadata, tensors in (
        (None, good),
        ({"rounds": "3", "tag": b""}, good),
        ({"rounds": 3, "tag": b"short"}, good),
        ({"rounds": 3, "tag": bytes(32)}, good[:-1]),
        ({"rounds": 3, "tag": bytes(32)}, [each.float() for each in good]),
        ({"rounds": 0, "tag": b""}, good),  # nobody is further
    ):
        one.averager._adopt(metadata, tensors)
        assert all(map(torch.equal, one.averager._method.shared.values(), own))
    assert "does not fit" in caplog.text
    one.averager._adopt({"rounds": 3, "tag": bytes(32)}, good)
    assert all(map(torch.equal, one.averager._method.shared.values(), good)) and one.averager._state_epoch == 3
