"""What of a torch optimizer a collaborative one still is: the view that schedulers, trainers and hooks have of it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from swarmcli.errors import OptimizerError


class AroundTorch(torch.optim.Optimizer):
    """Groups, statistics and hooks are those of the inner optimizer `opt`, which steps once per epoch."""

    opt: torch.optim.Optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise OptimizerError("parameters cannot be added after creation: every peer of the run holds the same ones")

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.opt.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.opt.register_step_post_hook(hook)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.opt.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.opt.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.opt.defaults

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Torch's own way would leave every Optimizer of the process broken."""
        raise TypeError("an Optimizer belongs to its process and peer, it is not copied or pickled: use state_dict()")
