"""What a newcomer takes over lets it go on exactly as the donor does; what does not fit changes nothing."""

import msgspec
import pytest
import torch

from swarmcli.optim.state.training_state import CapturedState, TrainingState

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}
SCHEDULERS = {
    "none": lambda optimizer: None,
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "multistep": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)],
        milestones=[3],
    ),
}


def make_state(seed: int, optimizer: str = "adamw", scheduler: str = "lambda", run_id: str = "run") -> TrainingState:
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator)]
    made = OPTIMIZERS[optimizer]([p.requires_grad_() for p in parameters])
    return TrainingState(run_id, made, SCHEDULERS[scheduler](made), extra_tensors=[torch.full((2,), float(seed))])


def advance(state: TrainingState, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        gradients = [torch.randn(parameter.shape, generator=generator) for parameter in state.parameters]
        state.step(gradients, state.position.after(bytes([step]) * 32, 10))


def travelled(captured: CapturedState) -> CapturedState:
    """The captured state as it arrives elsewhere: its metadata went through msgpack."""
    return CapturedState(msgspec.msgpack.decode(msgspec.msgpack.encode(captured.metadata)), captured.clone().tensors)


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "behind"),
    [
        ("sgd", "none", 0),
        ("momentum", "lambda", 2),
        ("adamw", "multistep", 0),
        ("adamw", "sequential", 2),
        ("adagrad", "sequential", 0),
        ("adafactor", "lambda", 2),
    ],
)
def test_a_newcomer_goes_on_bit_identically(optimizer: str, scheduler: str, behind: int) -> None:
    donor, newcomer = make_state(1, optimizer, scheduler), make_state(2, optimizer, scheduler)
    advance(donor, 5, seed=3)
    advance(newcomer, behind, seed=4)
    newcomer.restore(travelled(donor.capture()))
    assert newcomer.position == donor.position
    assert newcomer.digest() == donor.digest()
    assert torch.equal(newcomer.extra_tensors[0], donor.extra_tensors[0])
    for state in (donor, newcomer):
        advance(state, 5, seed=6)
    assert newcomer.digest() == donor.digest()
    assert newcomer.position == donor.position
    assert newcomer.optimizer.param_groups[0]["lr"] == donor.optimizer.param_groups[0]["lr"]
    settings = [{k: type(v) for k, v in s.optimizer.param_groups[0].items()} for s in (donor, newcomer)]
    assert settings[0] == settings[1]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m, t: t.pop("parameter/1"), id="parameter missing"),
        pytest.param(lambda m, t: t.update({"parameter/1": torch.zeros(4)}), id="parameter of another shape"),
        pytest.param(lambda m, t: t.update({"parameter/1": torch.zeros(3).double()}), id="parameter of another type"),
        pytest.param(lambda m, t: t.update({"parameter/2": torch.zeros(3)}), id="a parameter too many"),
        pytest.param(lambda m, t: t.pop("extra/0"), id="extra tensor missing"),
        pytest.param(lambda m, t: t.update({"statistic/7/exp_avg": torch.zeros(3)}), id="statistic of no parameter"),
        pytest.param(lambda m, t: t.update({"statistic/1/exp_avg": torch.zeros(99)}), id="statistic too large"),
        pytest.param(lambda m, t: t.update({f"statistic/1/{i}": torch.zeros(1) for i in range(20)}), id="too many"),
        pytest.param(lambda m, t: t.update({"statistic/x/exp_avg": torch.zeros(3)}), id="statistic without index"),
        pytest.param(lambda m, t: m.update(lineage=b"short"), id="lineage too short"),
        pytest.param(lambda m, t: m.update(epoch=-1), id="negative epoch"),
        pytest.param(lambda m, t: m.update(epoch="1"), id="epoch no number"),
        pytest.param(lambda m, t: m.update(groups=[]), id="no groups"),
        pytest.param(lambda m, t: m["groups"][0].update(lr="high"), id="learning rate no number"),
        pytest.param(lambda m, t: m["groups"][0].update(lr=float("nan")), id="learning rate NaN"),
        pytest.param(lambda m, t: m["groups"][0].update(foreign=1), id="foreign setting"),
        pytest.param(lambda m, t: m.update(scheduler=None), id="no scheduler"),
        pytest.param(lambda m, t: m["scheduler"].update(last_epoch=[1]), id="scheduler value of another kind"),
        pytest.param(lambda m, t: m.update(numbers=[]), id="numbers no mapping"),
        pytest.param(lambda m, t: m.update(numbers={"0/step": {"a": 1}}), id="a number that is none"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change) -> None:
    donor, newcomer = make_state(1), make_state(2)
    advance(donor, 3, seed=3)
    advance(newcomer, 1, seed=4)
    before, position = newcomer.capture().clone(), newcomer.position
    state = travelled(donor.capture())
    change(state.metadata, state.tensors)
    with pytest.raises(ValueError, match=r"\w"):
        newcomer.restore(state)
    after = newcomer.capture()
    assert newcomer.position == position
    assert after.metadata == before.metadata
    assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m, t: t.pop("statistic/0/step"), id="a statistic missing"),
        pytest.param(lambda m, t: m["scheduler"].update(lr_lambdas=[5]), id="a number for what a function holds"),
    ],
)
def test_what_only_the_libraries_find_out_is_a_state_that_does_not_fit_either(change) -> None:
    donor, newcomer = make_state(1), make_state(2)
    advance(donor, 3, seed=3)
    state = travelled(donor.capture())
    change(state.metadata, state.tensors)
    with pytest.raises(ValueError, match="cannot take it"):
        newcomer.restore(state)
    assert newcomer.torn
    newcomer.restore(travelled(donor.capture()))
    assert not newcomer.torn and newcomer.digest() == donor.digest()
