"""What scripts written for hivemind import from its module of this name."""

from torch.optim.lr_scheduler import LRScheduler

LRSchedulerBase = LRScheduler

__all__ = ["LRSchedulerBase"]
