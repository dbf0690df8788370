"""The optimizers of recipes are torch's: the same steps, by the same names; rates are those of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from swarmcli.errors import RecipeError
from swarmcli.optim.state.statistics import check_travel
from swarmcli.recipe import SchedulerSettings
from swarmcli.recipe.optimizers import OPTIMIZERS
from swarmcli.training import build_scheduler, build_task, optimizer_factory, optimizer_kind, parameter_groups
from swarmcli.training.memory import statistics_of
from swarmcli.training.schedule import averages_in, rate_by_epoch

from .small_tasks import build_optimizer, small


def step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def made(recipe: Any, model: nn.Module) -> torch.optim.Optimizer:
    return optimizer_factory(recipe)(parameter_groups(recipe, model))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "muon"])
def test_each_steps_as_torch_does_with_its_own_defaults(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    other = copy.deepcopy(model)
    recipe = small(tmp_path, f"optimizer={{name: {name}, learning_rate: 0.01}}")
    kind = getattr(torch.optim, OPTIMIZERS[name].torch_name)
    usual = {"weight_decay": 0.0} if name != "rprop" else {}
    ours, theirs = made(recipe, model), kind(other.parameters(), lr=0.01, **usual)
    for mine, expected in zip(step(model, ours), step(other, theirs), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    check_travel(ours.state_dict()["state"], [p for group in ours.param_groups for p in group["params"]])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_average_over_epochs_is_kept_beside_what_any_optimizer_keeps(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    other = copy.deepcopy(model)
    plain = small(tmp_path, f"optimizer.name={name}")
    recipe = small(tmp_path, f"optimizer.name={name}", "ema_decay=0.9")
    optimizer, without = made(recipe, model), made(plain, other)
    expected: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            theirs.grad = mine.grad.clone()
        optimizer.step()
        without.step()
        now = [parameter.detach().clone() for parameter in model.parameters()]
        expected = [0.9 * old + 0.1 * new for old, new in zip(expected or now, now, strict=True)]
    assert all(torch.equal(*both) for both in zip(model.parameters(), other.parameters(), strict=True))
    state = optimizer.state_dict()
    check_travel(state["state"], [p for group in optimizer.param_groups for p in group["params"]])
    assert averages_in(plain, model, state) == []
    pairs = {id(parameter): average for parameter, average in averages_in(recipe, model, state)}
    for parameter, average in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(pairs[id(parameter)], average)
    again = made(recipe, other)
    again.load_state_dict(state)
    assert all(
        torch.equal(again.state[p]["ema"], pairs[id(mine)])
        for p, mine in zip(other.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_statistics_that_memory_counts_are_those_that_are_kept(tmp_path: Path, name: str) -> None:
    model = nn.Linear(40, 30, bias=False)
    optimizer = made(recipe := small(tmp_path, f"optimizer.name={name}"), model)
    step(model, optimizer, 1)
    state = optimizer.state[model.weight]
    kept = sum(value.shape == model.weight.shape for value in state.values() if isinstance(value, torch.Tensor))
    assert kept <= statistics_of(recipe) <= kept + (name == "muon")


def test_muon_steps_the_matrices_within_the_model_and_adamw_all_else(tmp_path: Path) -> None:
    recipe = small(tmp_path, "optimizer={name: muon, learning_rate: 0.01}")
    model = build_task(recipe).build_model()
    by_muon, by_adamw = [], []
    for group in parameter_groups(recipe, model):
        (by_muon if group["by_muon"] else by_adamw).extend(id(p) for p in group["params"])
    names = {name for name, parameter in model.named_parameters() if id(parameter) in by_muon}
    assert names and all(name.startswith("transformer.h.") and name.endswith("weight") for name in names)
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= {
        name for name, parameter in model.named_parameters() if id(parameter) in by_adamw
    }
    optimizer = made(recipe, model)
    step(model, optimizer)
    check_travel(optimizer.state_dict()["state"], [p for group in optimizer.param_groups for p in group["params"]])


def test_muon_leaves_a_bias_of_two_dimensions_to_adamw(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.bias = nn.Parameter(torch.zeros(1, 2))
    groups = parameter_groups(small(tmp_path, "optimizer.name=muon"), model)
    assert [(group["params"], group["by_muon"]) for group in groups] == [([model.weight], True), ([model.bias], False)]


def test_muon_is_torchs_and_goes_on_from_its_state(tmp_path: Path) -> None:
    recipe = small(tmp_path, "optimizer={name: muon, learning_rate: 0.01}")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    other, later = copy.deepcopy(model), copy.deepcopy(model)
    muon = torch.optim.Muon([p for p in other.parameters() if p.ndim == 2], 0.01, 0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([p for p in other.parameters() if p.ndim < 2], 0.01, weight_decay=0.0)
    optimizer = made(recipe, model)

    class Both(torch.optim.Optimizer):
        def __init__(self) -> None:
            pass

        def step(self, closure: Any = None) -> None:
            muon.step()
            adamw.step()

    for mine, expected in zip(step(model, optimizer), step(other, Both()), strict=True):
        torch.testing.assert_close(mine, expected)
    resumed = made(recipe, later)
    later.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for mine, expected in zip(step(later, resumed), step(model, optimizer), strict=True):
        assert torch.equal(mine, expected)


def test_a_torch_without_the_optimizer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(RecipeError, match=r"torch .* has no Muon; install a later one, or take another opt"):
        optimizer_kind(small(tmp_path, "optimizer.name=muon"))


@pytest.mark.parametrize(
    ("settings", "set_so"),
    [
        ("name: adamw, betas: [0.8, 0.9], eps: 1e-6", {"betas": (0.8, 0.9), "eps": 1e-6}),
        ("name: sgd, momentum: 0.9, learning_rate: 0.5, args: {nesterov: true}", {"lr": 0.5, "nesterov": True}),
        ("name: rmsprop, args: {centered: true, alpha: 0.9}", {"centered": True, "alpha": 0.9}),
    ],
)
def test_every_setting_and_argument_reaches_torch(tmp_path: Path, settings: str, set_so: dict[str, Any]) -> None:
    for group in made(small(tmp_path, f"optimizer={{{settings}}}"), nn.Linear(2, 2)).param_groups:
        assert {key: group[key] for key in set_so} == set_so


@pytest.mark.parametrize(
    ("auto", "fields"),
    [
        ("AutoModelForCausalLM", {"model_type": "gpt_oss", "num_hidden_layers": 1}),
        ("AutoModelForMaskedLM", {"model_type": "mpnet"}),
        ("AutoModelForSequenceClassification", {"model_type": "xlnet"}),
        ("AutoModelForImageClassification", {"model_type": "swin"}),
        ("AutoModelForImageClassification", {"model_type": "convnextv2"}),
        ("AutoModelForImageClassification", {"model_type": "resnet"}),
    ],
)
def test_what_decays_is_what_the_trainer_has_decay(tmp_path: Path, auto: str, fields: dict[str, Any]) -> None:
    """Among them biases of two and four dimensions, and weights of one."""
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(**fields))
    decayed, plain = parameter_groups(small(tmp_path, "optimizer.weight_decay=0.1"), model)
    theirs = set(transformers.Trainer.get_decay_parameter_names(None, model))
    assert {id(parameter) for parameter in decayed["params"]} == {
        id(parameter) for name, parameter in model.named_parameters() if name in theirs
    }
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0) and plain["params"]


@pytest.mark.parametrize(
    ("bound", "gradient", "step"),
    [
        ("max_grad_norm", [30.0, 40.0], [0.3, 0.4]),
        ("max_grad_norm", [0.03, 0.04], [0.03, 0.04]),
        ("max_grad_value", [3.0, -0.25], [0.5, -0.25]),
    ],
)
def test_gradients_are_scaled_down_to_a_norm_or_their_numbers_cut(
    tmp_path: Path, bound: str, gradient: list[float], step: list[float]
) -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor(gradient)
    recipe = small(tmp_path, f"optimizer={{name: sgd, learning_rate: 1, {bound}: 0.5}}")
    made(recipe, nn.ParameterList([weight])).step()
    torch.testing.assert_close(weight.detach(), -torch.tensor(step))


def rates(settings: SchedulerSettings, max_epochs: int | None, count: int) -> list[float]:
    factor = rate_by_epoch(settings, max_epochs)
    return [pytest.approx(factor(epoch)) for epoch in range(count)]


def test_a_rate_rises_in_its_warm_up_and_falls_to_its_floor_and_stays() -> None:
    assert rates(SchedulerSettings(warmup_epochs=4), None, 6) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    settings = SchedulerSettings(name="linear", min_lr_ratio=0.2, warmup_epochs=1)
    assert rates(settings, 5, 8) == [0.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]


def test_the_schedule_moves_once_per_epoch_and_goes_on_from_its_state(tmp_path: Path) -> None:
    recipe = small(tmp_path, "optimizer.learning_rate=0.4", "lr_scheduler={name: linear, total_epochs: 4}")

    def rates_of(epochs: int, state: Any = None) -> tuple[list[float], Any]:
        optimizer = build_optimizer(recipe, nn.Linear(2, 2))
        scheduler, seen = build_scheduler(recipe, optimizer), []
        if state is not None:
            scheduler.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        for _ in range(epochs):
            seen.append(optimizer.param_groups[0]["lr"])
            assert len({group["lr"] for group in optimizer.param_groups}) == 1
            optimizer.step()
            scheduler.step()
        return seen, (scheduler.state_dict(), optimizer.state_dict())

    seen, state = rates_of(2)
    assert seen == pytest.approx([0.4, 0.3]) and rates_of(2, state)[0] == pytest.approx([0.2, 0.1])


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize(
    ("name", "extra", "keys"),
    [
        ("constant_with_warmup", {}, {}),
        ("linear", {}, {"total_epochs": 40}),
        ("cosine", {}, {"total_epochs": 40}),
        ("polynomial", {"power": 2.0, "lr_end": 0.1}, {"power": 2.0, "min_lr_ratio": 0.1, "total_epochs": 40}),
        ("cosine_with_restarts", {"num_cycles": 3}, {"cycles": 3, "total_epochs": 40}),
        ("inverse_sqrt", {}, {}),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 10, "min_lr_ratio": 0.2},
            {"decay_epochs": 10, "min_lr_ratio": 0.2, "total_epochs": 40},
        ),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {"min_lr_ratio": 0.1, "total_epochs": 40}),
    ],
)
def test_an_epoch_has_the_rate_of_the_trainers_step(
    name: Any, extra: dict[str, Any], keys: dict[str, Any], warmup: int
) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    theirs = get_scheduler(name, optimizer, warmup, 40, scheduler_specific_kwargs=extra)
    ours = rate_by_epoch(SchedulerSettings(name=name, warmup_epochs=warmup, **keys), None)
    for epoch in range(40):
        assert ours(epoch) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), epoch
        optimizer.step()
        theirs.step()
