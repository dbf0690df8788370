"""Averaging within the process groups of torch.distributed: ranks that are known and stay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from swarmcli.sharding.levels.plan import NOTHING, LevelAverage, LevelPlan, outline


class ProcessGroupLevels:
    """Each level cuts the ranks of the whole group into groups of consecutive ranks.

    The constructor makes the groups, so every rank of `process_group`, and no other, calls it at the same place in its
    program. Groups are never destroyed: one that is destroyed and made again would find the addresses of the former one
    in the store.
    """

    def __init__(self, plan: LevelPlan, process_group: dist.ProcessGroup | None = None) -> None:
        """`process_group`: None: all processes.

        Raises RuntimeError without torch.distributed, ValueError for group sizes that do not fit and for a process
        that is not in `process_group`.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "no process group is there: call torch.distributed.init_process_group() first, or give "
                "swarm=SwarmGroups(...) to average with the peers of a swarm"
            )
        self._plan = plan
        whole = dist.group.WORLD if process_group is None else process_group
        if not isinstance(whole, dist.ProcessGroup):
            raise ValueError(
                f"process_group={process_group!r}: expected a process group that this process (rank {dist.get_rank()}) "
                "is a member of; make the averager in its members only"
            )
        self.process_group = whole
        self._ranks = dist.get_process_group_ranks(whole)
        _check_sizes(plan, len(self._ranks))
        made: dict[int | None, tuple[str, dist.ProcessGroup]] = {}
        for size in plan.group_sizes:
            if size not in made:
                made[size] = self._group_of(size or len(self._ranks))
        self._levels = [made[size] for size in plan.group_sizes]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """This process's group at each level."""
        return [group for _, group in self._levels]

    def take_step(
        self, tensors: Sequence[torch.Tensor], step: int, places: Sequence[int]
    ) -> tuple[int, LevelAverage | None]:
        """Averages if a level is due. Returns the number of the next step, and the outcome.

        Every rank takes the same steps. Raises what `average` raises.
        """
        level = self._plan.due(step)
        return step + 1, None if level is None else self.average(level, tensors, step, places)

    def average(self, level: int, tensors: Sequence[torch.Tensor], step: int, places: Sequence[int]) -> LevelAverage:
        """Replaces the tensors by their mean over the members of this level's group, all of them or none.

        Every member that averages at this level gives tensors of the same shapes and types, in the same order, and of
        the same places. Raises ValueError, in every member alike, if their tensors or places differ; the RuntimeError
        of torch.distributed if a process is lost. Tensors are untouched then.
        """
        name, group = self._levels[level]
        if group.size() > 1:
            _check_alike(tensors, places, group, name)
        if not tensors:
            return LevelAverage(step, level, name, 0, NOTHING)
        if group.size() > 1:
            with torch.no_grad():
                _average(tensors, group)
        return LevelAverage(step, level, name, group.size())

    def _group_of(self, size: int) -> tuple[str, dist.ProcessGroup]:
        """The group of this rank among groups of a size, and its name."""
        first = dist.get_rank(self.process_group) // size * size
        ranks = self._ranks[first : first + size]
        name = f"ranks {', '.join(map(str, ranks))}"
        if size == len(self._ranks):
            return name, self.process_group
        # Only the members make a group, so processes outside of the hierarchy need not take part.
        backend = dist.get_backend_config(self.process_group)
        return name, dist.new_group(ranks, backend=backend, use_local_synchronization=True)


def _check_sizes(plan: LevelPlan, whole: int) -> None:
    if plan.group_sizes[-1] != whole:
        raise ValueError(
            f"period_group_size_dict ends with groups of {plan.group_sizes[-1]}, but the process group has {whole} "
            f"processes; the last size must be {whole}, or let process_group be a group of that size"
        )
    for period, size in zip(plan.periods, plan.group_sizes, strict=True):
        if size is None or whole % size:
            raise ValueError(
                f"groups of {size} at period {period} do not fit into {whole} processes; the size must divide {whole}"
            )


def _average(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Averages with one message for all tensors of a device, since many small messages take longer.

    Values are divided before they are added, and values of unlike types in the wider type, so the means are those of
    torch's averager, bit for bit. Nothing is written before every message has come back.
    """
    messages = []
    kinds: dict[tuple[torch.device, bool], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.is_complex()), []).append(tensor)
    for like in kinds.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in like])
        flat /= group.size()
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)  # another group's collective may still run: two at a time can deadlock
        dist.all_reduce(flat, group=group)
        messages.append((like, flat))
    for like, flat in messages:
        for tensor, mean in zip(like, flat.split([tensor.numel() for tensor in like]), strict=True):
            tensor.copy_(mean.view(tensor.shape))


def _check_alike(tensors: Sequence[torch.Tensor], places: Sequence[int], group: dist.ProcessGroup, name: str) -> None:
    """Raises ValueError at all members unless they average the same tensors: otherwise they would wait for each other
    forever, or add up values that do not belong together."""
    digest = int.from_bytes(outline(tensors, places)[:7])
    carried = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    own = torch.tensor([len(tensors), digest], device=tensors[0].device if tensors else carried)
    extremes = torch.cat([own, -own])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    most, highest, least, lowest = extremes.tolist()
    if highest != -lowest:
        counts = f"between {-least} and {most}" if most != -least else f"{most}, but other ones,"
        raise ValueError(
            f"{name} do not average the same parameters: {len(tensors)} have a gradient here, {counts} elsewhere. Only "
            "parameters with a gradient are averaged; freeze the same ones in every process, and let every backward "
            "pass reach the rest (or call zero_grad(set_to_none=False))"
        )
