"""An optimizer's statistics, wherever they are, and its settings as plain values that travel.

Statistics are in the optimizer's own memory, or divided among the processes of a site. A statistic's *place* is
`<parameter index>/<name>`; parameters count in the order of the optimizer's groups.

Settings of optimizers and schedulers travel as values that msgpack can encode. Values from a donor have to fit a
template, the value that this peer holds in the same place: the same keys, the same kinds. So a donor can change a
learning rate, but not what kind of thing it is.
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
    """What a training state needs of an optimizer's statistics. An optimizer that keeps them elsewhere has one as
    `.statistics`.

    While a method runs nobody steps the optimizer. SiteError: another process is gone.

    waits  whether methods wait for other processes: then none is for an event loop
    spool  directory of the file through which a downloaded state goes; None: it fits into memory
    """

    waits: bool
    spool: Path | None

    def capture(self) -> tuple[dict[str, AnyTensor], dict[str, Any]]:
        """Returns place → tensor, a live one or a distant copy of this moment; and place → plain value for the rest."""

    def staged(
        self, tensors: Mapping[str, AnyTensor], numbers: Mapping[str, Any], groups: Sequence[dict[str, Any]]
    ) -> AbstractContextManager[Callable[[], None]]:
        """Keeps new statistics ready inside the block, beside the present ones. The function that it yields replaces
        the present ones by these, and the options of the parameter groups by `groups`. If nobody calls it, nothing
        changes.

        The caller has checked that all places are of existing parameters.
        """


class OwnStatistics:
    """The statistics of a plain torch optimizer."""

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
    """The optimizer's own `.statistics`, if it has them; otherwise those of a plain torch optimizer."""
    found = getattr(optimizer, "statistics", None)
    return found if isinstance(found, Statistics) else OwnStatistics(optimizer)


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """An optimizer's parameter groups as its state dict has them, with indices in place of parameters. This fetches no
    statistics from other processes."""
    if not statistics_of(optimizer).waits:
        return list(optimizer.state_dict()["param_groups"])
    places = count()
    return [{**group, "params": [next(places) for _ in group["params"]]} for group in optimizer.param_groups]


def by_place(state: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Place → live tensor, and place → plain value for the rest, from the `state` of an optimizer's state dict."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, statistics in sorted(state.items()):  # so that equal states have equal bytes everywhere
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
    """Place → value, as optimizers keep it: parameter index → name → value. Raises ValueError for places that do not
    exist, for too many values of a parameter, and for tensors larger than their parameter."""
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
    """Raises ValueError, with the reason, for statistics that no newcomer could download. `state`: of the optimizer's
    `state_dict()`."""
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
    """The value as dicts, lists, numbers, strings and None, without mapping entries that cannot be plain."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items() if is_plain(item)}
    return value


def fit(template: Any, value: Any, where: str) -> Any:
    """Returns `value` in the form of `template`. Raises ValueError, which names the place where they differ in kind."""
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
