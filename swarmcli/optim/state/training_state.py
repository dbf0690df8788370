"""Everything that a newcomer needs to go on like the others: parameters, statistics, scheduler, position."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

from swarmcli.errors import OptimizerError
from swarmcli.optim.gradients.accumulator import lent
from swarmcli.optim.state.lineage import LINEAGE_BYTES, TORN, LineagePosition, first_lineage, hash_tensors, is_count
from swarmcli.optim.state.meaning import fit_schedule, fit_settings, schedule_asked, schedule_of, settings_of
from swarmcli.optim.state.norms import StepNorms, measure_step
from swarmcli.optim.state.statistics import by_parameter, check_travel, fit, groups_of, statistics_of, to_plain
from swarmcli.state.distant import AnyTensor, fill
from swarmcli.state.snapshot import copied

logger = logging.getLogger(__name__)

_STATISTIC = "statistic/"
T = TypeVar("T")
Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
OptimizerFactory = Callable[[Parameters], torch.optim.Optimizer]


class Scheduler(Protocol):
    """A learning rate scheduler; torch's all fit."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Shaped(Protocol):
    """A tensor, or the description of one."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Sequence[int]: ...


SchedulerFactory = Callable[[torch.optim.Optimizer], Scheduler]


@dataclass(frozen=True)
class CapturedState:
    """A training state in a form that travels: tensors by name, all else as plain values."""

    metadata: dict[str, Any]
    tensors: Mapping[str, AnyTensor]

    def clone(self) -> CapturedState:
        """Returns it with tensors that later steps do not change: copies in host memory; distant ones are copies
        already."""
        here = {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, torch.Tensor)}
        return CapturedState(self.metadata, {**self.tensors, **copied(here)})


class TrainingState:
    """Parameters, their optimizer and scheduler, extra tensors, and the position of their lineage.

    Parameters that nobody trains are no part of it, though the optimizer may have some: see `frozen.py`. The names of
    the tensors are `parameter/<index>` and `statistic/<index>/<name>`, in the order of the optimizer's parameter
    groups, `extra/<index>`, and `gradient/<name>` for what a method of averaging gradients shares.
    """

    def __init__(
        self,
        run_id: str,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        extra_tensors: Sequence[torch.Tensor] = (),
        shared: Mapping[str, torch.Tensor] | None = None,
        own: Mapping[str, torch.Tensor] | None = None,
        inner: torch.optim.Optimizer | None = None,
        outer: torch.optim.Optimizer | None = None,
    ) -> None:
        """`optimizer`: its statistics and settings are part of the state.

        shared   of the method of averaging gradients: tensors that all peers hold alike
        own      of the same: tensors that only this peer has, and that only go into its checkpoints
        inner    the optimizer whose learning rate the scheduler moves, if that is another one: its settings are part of
                 the state, its statistics are not
        outer    the optimizer that steps the state's parameters, if `optimizer` steps others
        """
        self.optimizer, self._inner, self._outer = optimizer, inner, outer or optimizer
        self.statistics = statistics_of(optimizer)
        self.scheduler = scheduler
        self.extra_tensors = tuple(extra_tensors)
        self.shared, self.own = dict(shared or {}), dict(own or {})
        self.parameters = tuple(p for group in self._outer.param_groups for p in group["params"])
        self._named = {f"parameter/{index}": each for index, each in enumerate(self.parameters) if each.requires_grad}
        self.trained = tuple(self._named.values())
        self.position = LineagePosition(0, 0, first_lineage(run_id, self.trained))
        self._may_travel = False  # the optimizer's statistics have been checked, and can travel
        self._rates = self._read_rates()  # as the last step of the scheduler, or the last state, has left them
        # Others at this position hold other parameters or statistics, since several groups have ended an epoch.
        self.apart = False

    @property
    def torn(self) -> bool:
        """Whether the parameters are partly another state's: another state has to replace them."""
        return self.position == TORN

    def digest(self) -> str:
        """SHA-256 over the trained parameters, in hexadecimal: equal if they are equal bit for bit."""
        return hash_tensors(self.trained).hex()

    def step(self, gradients: Sequence[torch.Tensor], position: LineagePosition) -> StepNorms:
        """One step of the optimizer with these gradients of the trained parameters, then one of the scheduler; then the
        state is at `position`. Raises OptimizerError, see `check_rates` and `note_step`."""
        self.check_rates()
        with lent(self.trained, gradients):
            norms = measure_step(self.trained, gradients, self.step_optimizer)
        self.end_epoch(position)
        return norms

    def step_optimizer(self) -> None:
        """Steps with the parameters' present gradients. Raises OptimizerError, see `note_step`."""
        self._outer.step()
        self.note_step()

    def note_step(self) -> None:
        """The optimizer has stepped. Raises OptimizerError after its first step if its statistics cannot travel: nobody
        could join, and this peer's state would be lost with it."""
        self._rates = self._read_rates()  # some optimizers move their own
        if self._may_travel or self.statistics.waits:  # a site has an optimizer of torch, whose statistics can travel
            return
        try:
            check_travel(self.optimizer.state_dict()["state"], self.parameters)
        except ValueError as error:
            raise OptimizerError(
                f"{type(self.optimizer).__name__} cannot train with others: newcomers download its statistics, and "
                f"{error}; take an optimizer that keeps numbers, and tensors no larger than their parameters"
            ) from error
        self._may_travel = True

    def end_epoch(self, position: LineagePosition) -> None:
        """The epoch that led to `position` is over: the scheduler steps. If that fails, at the end of a schedule for
        example, the learning rate stays as it is (logged), since the parameters have moved already."""
        if self.scheduler is not None:
            try:
                self.scheduler.step()
            except Exception as error:
                logger.warning("the scheduler failed, and the learning rate stays: %s: %s", type(error).__name__, error)
            self._rates = self._read_rates()
        self.position = position

    def check_rates(self) -> None:
        """Raises OptimizerError if anything but the state's scheduler has moved the learning rate: a scheduler that
        steps with one peer's batches moves it too far, and parts this peer from the others."""
        if (rates := self._read_rates()) != self._rates:
            raise OptimizerError(
                f"the learning rate was changed from {self._rates} to {rates} between two epochs of the run. Give a "
                "scheduler to the Optimizer (scheduler=…), which steps it once per epoch, alike at all peers, and step "
                "it nowhere else: give Trainer one that does nothing, prepare none with accelerate, return none from "
                "Lightning's configure_optimizers (examples/README.md)"
            )

    def _read_rates(self) -> list[float]:
        moved = self._inner or self.optimizer
        return [float(group["lr"]) for group in moved.param_groups if "lr" in group]

    def capture(self) -> CapturedState:
        """The state as it is now, with the live tensors: clone it before they may change. Raises OptimizerError if the
        state is torn."""
        self._check_whole()
        statistics, numbers = self.statistics.capture()
        tensors: dict[str, AnyTensor] = {f"{_STATISTIC}{place}": tensor for place, tensor in statistics.items()}
        tensors.update({name: tensor.detach() for name, tensor in self._own_tensors().items()})
        told = {"groups": [settings_of(group) for group in groups_of(self.optimizer)], "numbers": numbers}
        return CapturedState({**self._described(), **told, "lineage": self.position.lineage}, tensors)

    def _described(self) -> dict[str, Any]:
        """What a captured state and a checkpoint have in common."""
        inner = {} if self._inner is None else {"inner": [settings_of(group) for group in self._inner.param_groups]}
        return inner | {
            "epoch": self.position.epoch,
            "samples_seen": self.position.samples,
            "apart": self.apart,
            "scheduler": schedule_of(self.scheduler) if self.scheduler is not None else None,
        }

    @torch.no_grad()
    def restore(self, captured: CapturedState) -> None:
        """Takes over a state that another peer has captured. Raises ValueError, and changes nothing, if it does not
        fit.

        Raises OSError or SiteError if its tensors cannot be read, and ValueError if the optimizer or the scheduler
        itself cannot take what has passed the checks here. Then this state may be torn: parameters are filled in place,
        since there may be no memory for a second copy of them. A later call that succeeds makes it whole.
        """
        metadata = captured.metadata
        position = read_position(metadata)
        self.check_tensors(captured.tensors)
        statistics = _statistics_of(captured.tensors)
        numbers = {str(place): fit(None, n, str(place)) for place, n in _mapping(metadata, "numbers").items()}
        by_parameter(statistics | numbers, self.parameters)
        groups, schedule, inner = self.fit(metadata)

        # By now everything that this peer can refuse is checked, and statistics are staged beside the old ones, before
        # a tensor changes: so it takes over a donor's state wholly or not at all.
        with self.statistics.staged(statistics, numbers, groups) as install:
            self.position = TORN  # if anything interrupts this, nobody trains, donates or saves such parameters
            for name, own in self._own_tensors().items():
                fill(own, captured.tensors[name])
            try:
                install()
                self._follow(schedule, inner)
            except (KeyError, TypeError, AttributeError) as error:  # from libraries, which expect their own form
                raise ValueError(f"the optimizer or its scheduler cannot take it: {error!r:.200}") from error
        self.position, self.apart = position, metadata.get("apart") is True

    def fit(self, metadata: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
        """Returns, from another peer's state, the optimizer's parameter groups, the state of the scheduler ({}: there
        is none), and the groups of the inner optimizer ([]: there is none). Raises ValueError unless this peer's
        optimizers and scheduler have the same settings.
        """
        groups = fit_settings(groups_of(self.optimizer), metadata.get("groups"))
        inner = [] if self._inner is None else fit_settings(self._inner.param_groups, metadata.get("inner"))
        schedule = metadata.get("scheduler")
        if self.scheduler is not None:
            rates = [group["lr"] for group in inner or groups]
            return groups, fit_schedule(self.scheduler, schedule, rates), inner
        if schedule is not None:
            raise ValueError("scheduler: it has one, this peer has none")
        return groups, {}, inner

    def _follow(self, schedule: dict[str, Any], inner: Sequence[Mapping[str, Any]]) -> None:
        """Sets the scheduler, and the settings of the inner optimizer, to those of a state."""
        if self.scheduler is not None:
            self.scheduler.load_state_dict(schedule)
        if self._inner is not None:
            for group, settings in zip(self._inner.param_groups, inner, strict=True):
                group.update({key: value for key, value in settings.items() if key != "params"})
        self._rates = self._read_rates()

    def _reschedule(self, asked: Any, others: Sequence[str]) -> None:
        """Takes the schedule that the user has made, though the checkpoint has another, and warns."""
        scheduler, groups, told = cast(Any, self.scheduler), asked.optimizer.param_groups, ", ".join(others)
        scheduler.load_state_dict(asked.state_dict())
        for group, new in zip(scheduler.optimizer.param_groups, groups, strict=True):
            group.update({key: new[key] for key in ("lr", "initial_lr") if key in new})
        rates = [group["lr"] for group in groups]
        logger.warning(
            "the schedule made here counts, not the checkpoint's (unlike: %s): the rates are %s", told, rates
        )

    def checkpoint(self) -> dict[str, Any]:
        """The optimizer's state_dict, and under "swarm" the scheduler, the position, a digest of the parameters, and
        all other tensors of the state. Raises OptimizerError if the state is torn."""
        self._check_whole()
        swarm = {
            **self._described(),
            "lineage": self.position.lineage.hex(),
            "parameters": self.digest(),
            "gradients": {name: tensor.detach().clone() for name, tensor in (self.shared | self.own).items()},
            "extra": {str(index): tensor.detach().clone() for index, tensor in enumerate(self.extra_tensors)},
        }
        return {**self.optimizer.state_dict(), "swarm": swarm}

    def read_checkpoint(
        self, checkpoint: Mapping[str, Any], parameters: Sequence[torch.Tensor] | None = None
    ) -> Callable[[], None]:
        """Checks what `checkpoint` has returned against the restored parameters: those given, or this state's own.
        Returns a function that takes the checkpoint over; call it once this state has these parameters.

        Raises ValueError, and changes nothing, if the parameters are others, or the checkpoint does not fit.
        """
        swarm = _mapping(checkpoint, "swarm")
        restored = self.parameters if parameters is None else parameters
        if swarm.get("parameters") != hash_tensors(each for each in restored if each.requires_grad).hex():
            raise ValueError("the model's parameters are not those of the checkpoint: restore them first")
        try:
            lineage = bytes.fromhex(swarm.get("lineage", ""))
        except (TypeError, ValueError) as error:
            raise ValueError(f"lineage: expected hexadecimal digits, got {swarm.get('lineage')!r:.80}") from error
        position = read_position({**swarm, "lineage": lineage})
        if (self.scheduler is None) != (swarm.get("scheduler") is None):
            raise ValueError("either the checkpoint or this optimizer has no scheduler")
        saved, kept = _mapping({"gradients": {}, **swarm}, "gradients"), self.shared | self.own
        if _forms(saved) != _forms(kept):
            raise ValueError("the checkpoint is of a run that averages its gradients by another method")
        extra = {str(index): tensor for index, tensor in enumerate(self.extra_tensors)}
        # Checkpoints of earlier versions have them only in the model.
        saved_extra = _mapping({"extra": extra, **swarm}, "extra")
        if _forms(saved_extra) != _forms(extra):
            raise ValueError("the checkpoint has other extra tensors (the model's buffers) than this peer")
        groups, schedule, inner, statistics = self._settings_in(checkpoint, swarm)
        asked = schedule_asked(self.scheduler, to_plain(swarm.get("scheduler")), position.epoch)

        @torch.no_grad()
        def install() -> None:
            self.optimizer.load_state_dict({"state": statistics, "param_groups": groups})
            self._follow(schedule, inner)
            if asked is not None:
                self._reschedule(*asked)
            for mine, new in ((kept, saved), (extra, saved_extra)):
                for name, tensor in mine.items():
                    tensor.copy_(new[name])
            self.position, self.apart = position, swarm.get("apart") is True

        return install

    def _settings_in(
        self, checkpoint: Mapping[str, Any], swarm: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]], Mapping[Any, Any]]:
        """Parameter groups, schedule, inner groups and statistics of a checkpoint. Raises ValueError if they do not fit
        here."""
        saved = to_plain(checkpoint.get("param_groups"))
        told = {"groups": saved, "scheduler": to_plain(swarm.get("scheduler")), "inner": to_plain(swarm.get("inner"))}
        groups, schedule, inner = self.fit(told)
        if [group.get("params") for group in saved] != [group["params"] for group in groups]:
            raise ValueError("param_groups: they have other parameters than those of this peer's optimizer")
        statistics = _mapping(checkpoint, "state")
        for index in statistics:
            by_parameter({f"{index}/{name}": it for name, it in _mapping(statistics, index).items()}, self.parameters)
        return groups, schedule, inner, statistics

    def _check_whole(self) -> None:
        if self.torn:
            raise OptimizerError("this peer's parameters are partly those of a state whose download failed")

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        """Name → tensor, of all that every peer of the run holds in the same shapes; no statistics."""
        own = self._named | {f"extra/{index}": tensor for index, tensor in enumerate(self.extra_tensors)}
        return own | {f"gradient/{name}": tensor for name, tensor in self.shared.items()}

    def check_tensors(self, tensors: Mapping[str, Shaped]) -> None:
        """Raises ValueError unless this state could take over tensors of these names, types and shapes."""
        own = self._own_tensors()
        by_parameter(_statistics_of(tensors), self.parameters)
        for name, tensor in tensors.items():
            form = (own[name].dtype, *own[name].shape) if name in own else ()
            if form != (tensor.dtype, *tensor.shape) and not name.startswith(_STATISTIC):
                raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} is not what this model has there")
        missing = own.keys() - tensors.keys()
        if missing:
            raise ValueError(f"{min(missing)} is missing")


def _statistics_of(tensors: Mapping[str, T]) -> dict[str, T]:
    """Place → statistic."""
    return {n.removeprefix(_STATISTIC): tensor for n, tensor in tensors.items() if n.startswith(_STATISTIC)}


def read_position(metadata: Any) -> LineagePosition:
    """The position that a state's metadata names. Raises ValueError if it names none."""
    if not isinstance(metadata, Mapping):
        raise ValueError(f"expected a mapping, got {metadata!r:.60}")
    epoch, samples, lineage = (metadata.get(key) for key in ("epoch", "samples_seen", "lineage"))
    if not isinstance(epoch, int) or not isinstance(samples, int) or not is_count(epoch, samples):
        raise ValueError(f"epoch and samples_seen: expected counts, got {epoch!r:.40} and {samples!r:.40}")
    if not isinstance(lineage, bytes) or len(lineage) != LINEAGE_BYTES:
        raise ValueError(f"lineage: expected {LINEAGE_BYTES} bytes, got {lineage!r:.80}")
    return LineagePosition(epoch, samples, lineage)


def _forms(tensors: Mapping[str, Any]) -> dict[str, object]:
    """Equal for tensors of equal names, types and shapes."""
    return {
        name: (each.dtype, each.shape) if isinstance(each, torch.Tensor) else type(each)
        for name, each in tensors.items()
    }


def _mapping(metadata: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = metadata.get(key)
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}: expected a mapping, got {value!r:.60}")
    return value
