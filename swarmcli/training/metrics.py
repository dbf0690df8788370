"""Metrics of torchmetrics as tasks use them. Importing this takes seconds, so only evaluations do."""

from __future__ import annotations

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.text import Perplexity, ROUGEScore


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
    """Makes a metric. perplexity; accuracy: the share of right answers; f1: the mean over all classes that data or
    answers have; rouge_l: compares texts that the model writes with those that it should have written."""
    match name:
        case "perplexity":
            return TokenPerplexity()
        case "accuracy":
            return MulticlassAccuracy(choices, average="micro", validate_args=False)
        case "rouge_l":
            return RougeL()
        case _:
            return MulticlassF1Score(choices, average="macro", validate_args=False)
