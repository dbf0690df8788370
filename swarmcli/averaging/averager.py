"""DecentralizedAverager: averaging for programs without coroutines. A thin shell over AveragerCore."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Literal, TypeVar, overload

import torch

from swarmcli.averaging.config import AveragerConfig, MatchmakingOptions
from swarmcli.averaging.control import RoundRequest, RoundResult, StepControl
from swarmcli.averaging.core import AveragerCore
from swarmcli.averaging.patience import AllreduceOptions
from swarmcli.compression import CompressionBase, NoCompression
from swarmcli.dht import DHT
from swarmcli.errors import AveragingError
from swarmcli.network.identity import PeerID
from swarmcli.network.thread import LoopThread, SwarmFuture

T = TypeVar("T")

logger = logging.getLogger(__name__)


class AveragingMode(Enum):
    """What this peer is to the others."""

    NODE = "node"  # can be dialed, sends and reduces
    CLIENT = "client"  # cannot be dialed
    AUX = "aux"  # reduces for others, sends nothing of its own


class DecentralizedAverager:
    """Averages tensors with whoever else has an averager of the same prefix. Methods may come from any thread.

    Tensors change in place, only when a round commits, and then all at once.
    """

    def __init__(
        self,
        averaged_tensors: Sequence[torch.Tensor],
        dht: DHT,
        *,
        start: bool,
        prefix: str,
        target_group_size: int | None = None,
        min_group_size: int = 2,
        initial_group_bits: str = "",
        min_matchmaking_time: float = 5.0,
        request_timeout: float = 3.0,
        averaging_alpha: float = 1.0,
        part_size_bytes: int = 524288,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        sender_timeout: float | None = None,
        reducer_timeout: float | None = None,
        compression: CompressionBase | None = None,
        bandwidth: float | None = None,
        min_vector_size: int = 0,
        auxiliary: bool = False,
        client_mode: bool | None = None,
        shutdown_timeout: float = 5.0,
    ) -> None:
        """Options are explained in MatchmakingOptions, AllreduceOptions and AveragerConfig.

        `next_chunk_timeout` is what `sender_timeout` is unless given; `client_mode` and `compression` default to the
        DHT's mode and to none. Raises ValueError and TypeError for arguments that make no sense.
        """
        if client_mode is False and dht.client_mode:
            raise ValueError("client_mode=False needs a DHT that others can dial; this one is in client mode")
        self.dht = dht
        self._tensors = list(averaged_tensors)
        self._shutdown_timeout = float(shutdown_timeout)
        self.config = AveragerConfig(
            prefix=prefix,
            matchmaking=MatchmakingOptions(
                target_group_size=target_group_size,
                min_group_size=min_group_size,
                min_matchmaking_time=min_matchmaking_time,
                request_timeout=request_timeout,
            ),
            allreduce=AllreduceOptions(
                compression=compression if compression is not None else NoCompression(),
                part_size_bytes=part_size_bytes,
                allreduce_timeout=allreduce_timeout,
                sender_timeout=sender_timeout if sender_timeout is not None else next_chunk_timeout,
                reducer_timeout=reducer_timeout,
            ),
            initial_group_bits=initial_group_bits,
            averaging_alpha=averaging_alpha,
            min_vector_size=min_vector_size,
            bandwidth=bandwidth,
            auxiliary=auxiliary,
            client_mode=client_mode,
        )
        self._thread: LoopThread | None = None
        self._starting: SwarmFuture[AveragerCore] | None = None
        self._closed = False
        if start:
            self.run_in_background()

    # Life

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Starts it, which needs a DHT that runs. Raises ValueError for a prefix that this DHT's peer uses already.

        TimeoutError after `timeout` seconds. After an error nothing is left running.
        """
        if self._closed or self._thread is not None:
            raise RuntimeError("this averager has been shut down" if self._closed else "this averager runs already")
        self._thread = LoopThread.acquire()
        self._starting = self._thread.submit(self._start())
        if not await_ready:
            return
        try:
            self._starting.result(timeout)
        except (Exception, KeyboardInterrupt):
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Leaves its groups and ends, within `shutdown_timeout` seconds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            return
        try:
            self._thread.run(self._stop(), self._shutdown_timeout)
        except TimeoutError:
            logger.warning("the averager of %r did not end within %g s", self.prefix, self._shutdown_timeout)
        finally:
            self._thread.release()

    @property
    def is_alive(self) -> bool:
        started = self._starting is not None and self._starting.done() and not self._starting.cancelled()
        return started and not self._closed and self.dht.is_alive()

    def __enter__(self) -> DecentralizedAverager:
        if self._thread is None:
            self.run_in_background()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"<DecentralizedAverager {self.prefix!r} {'alive' if self.is_alive else 'not running'}>"

    # What it is

    @property
    def prefix(self) -> str:
        return self.config.prefix

    @property
    def peer_id(self) -> PeerID:
        return self.dht.peer_id

    @property
    def client_mode(self) -> bool:
        own = self.config.client_mode
        return self.dht.client_mode if own is None else own

    @property
    def mode(self) -> AveragingMode:
        if self.config.auxiliary:
            return AveragingMode.AUX
        return AveragingMode.CLIENT if self.client_mode else AveragingMode.NODE

    @property
    def total_size(self) -> int:
        """Elements in all tensors together."""
        return sum(tensor.numel() for tensor in self._tensors)

    # Rounds

    @overload
    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: Literal[True] = True,
    ) -> RoundResult | None: ...
    @overload
    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        *,
        wait: Literal[False],
    ) -> StepControl: ...
    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: bool = True,
    ) -> RoundResult | StepControl | None:
        """One round of averaging.

        `gather`: anything msgpack carries, for all members of the group. `scheduled_time`: swarm time before which
        the group does not begin. `weight`: of this peer's tensors, 1 unless given. `timeout`: seconds for finding a
        group, over all tries. Returns what every member gathered, by peer id, or None if the round failed (logged;
        the tensors are untouched then). With `wait=False` returns the StepControl at once, which says why.
        """
        if wait and require_trigger:
            raise ValueError("require_trigger=True needs wait=False: nobody could call allow_allreduce() otherwise")
        request = RoundRequest(
            gather=gather,
            scheduled_time=scheduled_time,
            weight=1.0 if weight is None else weight,
            timeout=timeout,
            allow_retries=allow_retries,
            require_trigger=require_trigger,
        )
        control = self._run(lambda core: core.begin_round(request))
        if not wait:
            return control
        try:
            return control.result()
        except AveragingError as error:
            logger.warning("no average of %r: %s", self.prefix, error)
            return None
        finally:
            control.cancel()  # without effect unless the waiting was interrupted

    # Tensors and bits

    @contextmanager
    def get_tensors(self) -> Iterator[Sequence[torch.Tensor]]:
        """Exclusive access to the tensors; waits for an all-reduce under way. Changing them in place is fine."""
        thread, core = self._running_on(), self._core()
        access = core.tensors()
        tensors = thread.run(access.__aenter__())
        try:
            yield tensors
        finally:
            thread.run(access.__aexit__(None, None, None))

    @overload
    def get_group_bits(self, wait: Literal[True] = True) -> str: ...
    @overload
    def get_group_bits(self, wait: Literal[False]) -> SwarmFuture[str]: ...
    def get_group_bits(self, wait: bool = True) -> str | SwarmFuture[str]:
        """The bucket in which the next group is looked for."""
        return self._run(lambda core: core.group_bits, wait)

    @overload
    def set_group_bits(self, group_bits: str, wait: Literal[True] = True) -> None: ...
    @overload
    def set_group_bits(self, group_bits: str, wait: Literal[False]) -> SwarmFuture[None]: ...
    def set_group_bits(self, group_bits: str, wait: bool = True) -> SwarmFuture[None] | None:
        """Moves to another bucket from the next round on. Raises ValueError for anything but zeros and ones."""
        return self._run(lambda core: core.set_group_bits(group_bits), wait)

    # Inside

    def _running_on(self) -> LoopThread:
        if self._thread is None or self._closed:
            raise RuntimeError("this averager is not running; start it with run_in_background()")
        return self._thread

    def _core(self) -> AveragerCore:
        self._running_on()
        assert self._starting is not None
        return self._starting.result()

    def _run(self, action: Callable[[AveragerCore], T], wait: bool = True) -> Any:
        """Calls `action` with the core on the loop's thread."""
        thread = self._running_on()

        async def act() -> T:
            assert self._starting is not None
            return action(await asyncio.shield(asyncio.wrap_future(self._starting)))

        work: Coroutine[Any, Any, T] = act()
        return thread.run(work) if wait else thread.submit(work)

    async def _start(self) -> AveragerCore:
        core = AveragerCore(self._tensors, self.dht.node, self.config)
        await core.start()
        return core

    async def _stop(self) -> None:
        if self._starting is None or self._starting.cancelled():
            return
        core = None
        try:
            core = await asyncio.shield(asyncio.wrap_future(self._starting))
        except Exception:
            logger.debug("the averager of %r had not started", self.prefix, exc_info=True)
        if core is not None:
            await core.shutdown()
