"""An offloaded optimizer steps as one in place does, on copies that reach the model when it is told to."""

from collections.abc import Callable

import pytest
import torch

from swarmcli.errors import OptimizerError
from swarmcli.optim.state.replica import InPlace, Offloaded
from swarmcli.optim.state.training_state import TrainingState

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)


def groups_of(model: torch.nn.Module) -> list[dict[str, object]]:
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": weights, "lr": 0.05}, {"params": others, "weight_decay": 0.0}]


def train(state: TrainingState, placement: InPlace | Offloaded, model: torch.nn.Module, steps: int) -> None:
    """Gradients from the model, steps in the state, as the Optimizer does it."""
    generator = torch.Generator().manual_seed(6)
    for step in range(steps):
        inputs = torch.randn(16, 4, generator=generator).to(placement.model_parameters[0].dtype)
        model.zero_grad()
        model(inputs).square().mean().backward()
        state.step([p.grad for p in placement.model_parameters], state.position.after(bytes([step]) * 32, 16))
        placement.publish()


@pytest.mark.parametrize(
    ("make", "dtype", "arrange"),
    [
        pytest.param(OPTIMIZERS["sgd"], torch.float64, groups_of, id="sgd in groups"),
        pytest.param(OPTIMIZERS["adamw"], torch.float32, lambda model: list(model.parameters()), id="adamw"),
        pytest.param(OPTIMIZERS["adamw"], torch.bfloat16, groups_of, id="adamw in bfloat16 and groups"),
        pytest.param(OPTIMIZERS["adafactor"], torch.float32, groups_of, id="adafactor in groups"),
    ],
)
def test_it_steps_bit_for_bit_as_in_place(
    make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, arrange: Callable[[torch.nn.Module], list]
) -> None:
    usual, offloaded = make_model(dtype), make_model(dtype)
    optimizer = make(arrange(usual))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    in_place = InPlace([p for group in optimizer.param_groups for p in group["params"]])
    one = TrainingState("run", optimizer, schedule)
    place = Offloaded(arrange(offloaded), make)
    other = TrainingState("run", place.optimizer, torch.optim.lr_scheduler.ExponentialLR(place.optimizer, 0.9))
    assert one.position == other.position, "peers with and without offloading are of one lineage"
    train(one, in_place, usual, 10)
    train(other, place, offloaded, 10)
    for left, right in zip(usual.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(left, right)
    assert one.digest() == other.digest()


def test_groups_and_their_options_are_kept() -> None:
    model = make_model()
    model[0].bias.requires_grad_(False)
    place = Offloaded(groups_of(model), OPTIMIZERS["adamw"])
    assert [group["lr"] for group in place.optimizer.param_groups] == [0.05, 0.01]
    assert [group["weight_decay"] for group in place.optimizer.param_groups] == [0.1, 0.0]
    expected = [model[0].weight, model[2].weight, model[0].bias, model[2].bias]
    assert all(given is kept for given, kept in zip(expected, place.model_parameters, strict=True))
    assert [p.requires_grad for p in place.state_parameters] == [True, True, False, True]
    assert set(place.state_parameters) & set(place.model_parameters) == {model[0].bias}, "it needs no copy"


def test_the_model_changes_only_when_it_is_published() -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    place = Offloaded(model.parameters(), OPTIMIZERS["sgd"])
    state = TrainingState("run", place.optimizer)
    state.step([torch.ones_like(p) for p in place.model_parameters], state.position.after(bytes(32), 1))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    place.publish()
    for parameter, copy, old in zip(model.parameters(), place.state_parameters, before, strict=True):
        assert torch.equal(parameter, copy)
        assert not torch.equal(parameter, old)


@pytest.mark.parametrize("action", ["check", "publish", "adopt"])
def test_a_changed_shape_is_refused_by_name(action: str) -> None:
    model = make_model()
    place = Offloaded(model.parameters(), OPTIMIZERS["sgd"])
    model[0].bias.data = torch.zeros(9)
    before = [copy.clone() for copy in place.state_parameters]
    with pytest.raises(OptimizerError, match=r"parameter 1 has become torch.float32 of shape \(9,\)"):
        getattr(place, action)()
    assert all(torch.equal(copy, old) for copy, old in zip(place.state_parameters, before, strict=True))


def test_gradients_given_to_the_offloaded_optimizer_are_refused_by_name() -> None:
    place = Offloaded(make_model().parameters(), OPTIMIZERS["sgd"])
    place.state_parameters[2].grad = torch.zeros_like(place.state_parameters[2])
    with pytest.raises(OptimizerError, match="parameter 2 was given a gradient"):
        place.check()


def test_what_cannot_be_offloaded_is_refused_by_name() -> None:
    model = make_model()
    with pytest.raises(TypeError, match="params: expected an iterable"):
        Offloaded(model[0].weight, OPTIMIZERS["sgd"])
    with pytest.raises(TypeError, match="params: expected parameters or groups of them, got int"):
        Offloaded([1], OPTIMIZERS["sgd"])
    with pytest.raises(TypeError, match="returned int"):
        Offloaded(model.parameters(), lambda _: 1)
    with pytest.raises(ValueError, match="and no others"):
        Offloaded(model.parameters(), lambda _: OPTIMIZERS["sgd"](make_model().parameters()))
