"""Metrics of torchmetrics as tasks use them. Importing this takes seconds: only evaluations do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.text import Perplexity, ROUGEScore
from torchmetrics.utilities import dim_zero_sum


class TokenPerplexity(Perplexity):
    """exp of the mean negative log likelihood of logits (tokens, vocabulary) for targets (tokens,)."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds[None], target[None])


class RougeL(ROUGEScore):
    """The F measure of the longest common subsequences of words. It keeps a number for each text, and no sums."""

    def __init__(self) -> None:
        super().__init__(rouge_keys="rougeL")

    def compute(self) -> Tensor:
        return super().compute()["rougeL_fmeasure"]


def metric_called(name: str, choices: int) -> Metric:
    """perplexity; accuracy: the share of right answers; f1: the mean over all classes that data or answers have;
    rouge_l: of texts that the model writes, beside those that it should have written."""
    match name:
        case "perplexity":
            return TokenPerplexity()
        case "accuracy":
            return MulticlassAccuracy(choices, average="micro", validate_args=False)
        case "rouge_l":
            return RougeL()
        case _:
            return MulticlassF1Score(choices, average="macro", validate_args=False)


def sums_of(metrics: Mapping[str, Metric]) -> dict[str, Tensor]:
    """The sums of the metrics so far, by "metric.state". Those that keep more than sums are left out."""
    return {
        f"{name}.{state}": value
        for name, metric in metrics.items()
        if is_sum(metric)
        for state, value in metric.metric_state.items()
    }


def add_sums(metrics: Mapping[str, Metric], sums: Mapping[str, Any]) -> None:
    """Adds what another evaluator has summed up. Raises ValueError, before anything is added, where names, shapes or
    types differ."""
    own = sums_of(metrics)
    for name, value in own.items():
        other = sums.get(name)
        if not isinstance(other, Tensor) or (other.shape, other.dtype) != (value.shape, value.dtype):
            raise ValueError(f"the sums of {name} do not fit: {value.dtype} {tuple(value.shape)} is wanted")
    if len(sums) != len(own):
        raise ValueError(f"there are sums of {len(sums)} states, and {len(own)} are wanted")
    for name, metric in metrics.items():
        if is_sum(metric):
            metric.merge_state({state: sums[f"{name}.{state}"].to(metric.device) for state in metric.metric_state})


def is_sum(metric: Metric) -> bool:
    """Whether several evaluators can share the work: all that it keeps are sums."""
    return all(each is dim_zero_sum for each in metric._reductions.values())
