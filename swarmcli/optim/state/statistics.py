"""An optimizer's statistics, wherever they are, and its settings as plain values that travel.

Statistics are in the optimizer's own memory, or shared out among the processes of a site. A statistic's *place* is
`<parameter index>/<name>`, parameters being counted in the order of the optimizer's groups.

Settings of optimizers and schedulers travel as values that msgpack carries. Values that arrive from a donor are fitted
to a template, the value that this peer holds in the same place: the same keys, the same kinds. So a donor can change a
learning rate, never what kind of thing it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from swarmcli.compression.base import dtype_name
from swarmcli.state.distant import AnyTensor, loaded

MAX_STATISTICS = 16  # tensors or numbers per parameter; Adam has three
MAX_NAME = 64  # characters of a statistic's name
T = TypeVar("T")


@runtime_checkable
class Statistics(Protocol):
    """A training state asks this of its statistics. An optimizer that keeps them elsewhere has one as `.statistics`.

    Every method may block where they lie in other processes (`waits`), so none is for an event loop then. While one
    runs nobody steps the optimizer. SiteError: another process is gone.

    waits  whether its methods wait for other processes
    spool  the directory for the file that a downloaded state goes through; None: it fits into memory
    """

    waits: bool
    spool: Path | None

    def capture(self) -> tuple[dict[str, AnyTensor], dict[str, Any]]:
        """By place: tensors, live ones or distant copies of this moment; and what is no tensor as plain values."""

    def staged(
        self, tensors: Mapping[str, AnyTensor], numbers: Mapping[str, Any], groups: Sequence[dict[str, Any]]
    ) -> AbstractContextManager[Callable[[], None]]:
        """Has all of these ready inside the block, beside what there is. The function that it yields puts them in its
        place: what is not named is dropped, and the options of the parameter groups are these. If it is not called,
        nothing changes.

        All that comes has been checked to be of parameters that there are.
        """


class OwnStatistics:
    """Those of a plain torch optimizer."""

    waits = False
    spool: Path | None = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def capture(self) -> tuple[dict[str, AnyTensor], dict[str, Any]]:
        tensors, numbers = by_place(self._optimizer.state_dict()["state"])
        return {**tensors}, numbers

    @contextmanager
    def staged(
        self, tensors: Mapping[str, AnyTensor], numbers: Mapping[str, Any], groups: Sequence[dict[str, Any]]
    ) -> Iterator[Callable[[], None]]:
        values: dict[str, Any] = {place: loaded(tensor) for place, tensor in tensors.items()}
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        statistics = by_parameter(values | dict(numbers), parameters)
        state = {**self._optimizer.state_dict(), "state": statistics, "param_groups": list(groups)}
        yield lambda: self._optimizer.load_state_dict(state)


def statistics_of(optimizer: torch.optim.Optimizer) -> Statistics:
    """The optimizer's own idea of where they are, if it has one."""
    found = getattr(optimizer, "statistics", None)
    return found if isinstance(found, Statistics) else OwnStatistics(optimizer)


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Its parameter groups as its state dict has them, with places in place of parameters. Statistics that lie in other
    processes are not fetched for that."""
    if not statistics_of(optimizer).waits:
        return list(optimizer.state_dict()["param_groups"])
    places = count()
    return [{**group, "params": [next(places) for _ in group["params"]]} for group in optimizer.param_groups]


def by_place(state: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimizer's statistics by parameter index and name: live tensors, and all else as plain values."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, statistics in sorted(state.items()):  # equal states are described by equal bytes anywhere
        for name, value in statistics.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}/{name}"] = value.detach()
            else:
                numbers[f"{index}/{name}"] = to_plain(value)
    return tensors, numbers


def read_place(text: object) -> tuple[int, str]:
    """Parameter index and name. Raises ValueError."""
    index, separator, name = str(text).partition("/")
    if (
        not separator
        or len(index) > 9
        or not index.isdecimal()
        or index != str(int(index))
        or not 0 < len(name) <= MAX_NAME
    ):
        raise ValueError(f"{text!r:.80}: expected <parameter index>/<name of the statistic>")
    return int(index), name


def by_parameter(values: Mapping[str, T], parameters: Sequence[torch.Tensor]) -> dict[int, dict[str, T]]:
    """Values by place as optimizers keep them. Raises ValueError for places that there are not, for too many, and for
    tensors larger than their parameter."""
    statistics: dict[int, dict[str, T]] = {}
    for place, value in values.items():
        index, name = read_place(place)
        if index >= len(parameters):
            raise ValueError(f"statistics of parameter {index}: there are only {len(parameters)} parameters")
        of_parameter = statistics.setdefault(index, {})
        if len(of_parameter) >= MAX_STATISTICS:
            raise ValueError(f"statistics of parameter {index}: more than {MAX_STATISTICS}")
        most, numel = max(1, parameters[index].numel()), math.prod(getattr(value, "shape", ()))
        if numel > most:
            raise ValueError(f"{name!r} of parameter {index} has {numel} elements, its parameter {most}")
        of_parameter[name] = value
    return statistics


def check_travel(state: Mapping[Any, Any], parameters: Sequence[torch.Tensor]) -> None:
    """Raises ValueError, with the reason, for statistics of an optimizer that no newcomer could download. `state`: that
    of its `state_dict()`."""
    for index, statistics in state.items():
        if not isinstance(index, int) or not isinstance(statistics, Mapping):
            raise ValueError(f"it keeps {str(index)[:40]!r} beside the statistics of its parameters")
        by_parameter({f"{index}/{name}": value for name, value in statistics.items()}, parameters)
        for name, value in statistics.items():
            if not _travels(value):
                form = f"{value.layout} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(f"{name!r:.40} of parameter {index} is a {form}")


def _travels(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return value is None or isinstance(value, _Scalar)
    try:
        return value.layout is torch.strided and bool(dtype_name(value.dtype))
    except TypeError:
        return False


_Scalar = (bool, int, float, str)


def is_plain(value: Any) -> bool:
    """Whether `to_plain` can express the value."""
    if value is None or isinstance(value, _Scalar):
        return True
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, Mapping) and all(isinstance(k, str | int) and is_plain(v) for k, v in value.items())


def to_plain(value: Any) -> Any:
    """The value made of dicts, lists, numbers, strings and None. Mapping entries that are not plain are left out."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items() if is_plain(item)}
    return value


def fit(template: Any, value: Any, where: str) -> Any:
    """`value` in the form of `template`. Raises ValueError naming the place where they differ in kind."""
    if isinstance(template, Mapping):
        return _fit_mapping(template, value, where)
    if isinstance(template, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(template):
            raise ValueError(f"{where}: expected {len(template)} items, got {value!r:.60}")
        pairs = enumerate(zip(template, value, strict=True))
        return type(template)(fit(own, new, f"{where}[{index}]") for index, (own, new) in pairs)
    if isinstance(template, torch.Tensor):
        return torch.full_like(template, _number(value, where))
    if template is None:
        if value is not None and not isinstance(value, _Scalar):
            raise ValueError(f"{where}: expected nothing or a scalar, got {type(value).__name__}")
        return value
    if isinstance(template, bool | str):
        if type(value) is not type(template):
            raise ValueError(f"{where}: expected {type(template).__name__}, got {type(value).__name__}")
        return value
    return _number(value, where)


def _fit_mapping(template: Mapping[Any, Any], value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected a mapping, got {type(value).__name__}")
    shared = {key for key, item in template.items() if is_plain(item)}
    if set(value) != shared:
        differing = sorted(map(str, set(value) ^ shared))[:5]
        raise ValueError(f"{where}: keys differ in {', '.join(differing)}")
    fitted = {key: fit(item, value[key], f"{where}.{key}") if key in shared else item for key, item in template.items()}
    return fitted if type(template) is dict else type(template)(fitted)  # type: ignore[call-arg]


def _number(value: Any, where: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{where}: expected a number, got {value!r:.60}")
    return value
