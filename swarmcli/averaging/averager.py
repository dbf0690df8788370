"""DecentralizedAverager: averaging for programs without coroutines. A thin shell over AveragerCore."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any, Literal, overload

import torch

from swarmcli.averaging.aggregators import Aggregator, Mean
from swarmcli.averaging.checks import check_flags, check_numbers, check_tensors
from swarmcli.averaging.config import AllreduceOptions, AveragerConfig, MatchmakingOptions, Trust
from swarmcli.averaging.core import AveragerCore
from swarmcli.averaging.round.plan import Layout
from swarmcli.averaging.round.program import RoundProgram
from swarmcli.averaging.round.result import RoundResult
from swarmcli.averaging.shell import CoreRunner
from swarmcli.averaging.step_control import RoundRequest, StepControl
from swarmcli.compression import CompressionBase, CompressionInfo, NoCompression
from swarmcli.dht import DHT
from swarmcli.errors import AveragingError, StateDownloadError
from swarmcli.hivemind_names import names_new_words
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import SwarmFuture, offload
from swarmcli.network.wire.messages import MOST
from swarmcli.state.sharing import StateOffer

logger = logging.getLogger(__name__)

_USUAL = AllreduceOptions()


class AveragingMode(Enum):
    """What this peer does for the others of its group."""

    NODE = "node"  # can be dialed, sends and reduces
    CLIENT = "client"  # cannot be dialed
    AUX = "aux"  # reduces for others, sends nothing of its own


class DecentralizedAverager:
    """Averages tensors with whoever else has an averager of the same prefix. Any thread may call its methods.

    The tensors change in place, only when a round commits, and then all at once.
    """

    # Subclasses set these.
    _by_differences = True  # see AveragerConfig; False where each round averages new tensors
    _program: RoundProgram | None = None  # the phases of a round
    _tag = b""  # only averagers with equal tags average with each other
    _state_epoch = -1  # of the state that this peer shares; newcomers ask donors with a higher one first

    @names_new_words("DecentralizedAverager")
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
        part_size_bytes: int = 1 << 20,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        sender_timeout: float | None = None,
        reducer_timeout: float | None = None,
        compression: CompressionBase | None = None,
        state_compression: CompressionBase | None = None,
        tensor_infos: Sequence[CompressionInfo] | None = None,
        bandwidth: float | None = None,
        min_vector_size: int = 0,
        auxiliary: bool = False,
        allow_state_sharing: bool | None = None,
        declare_state_period: float = 30.0,
        client_mode: bool | None = None,
        shutdown_timeout: float = 5.0,
        daemon: bool = True,
        trust: Trust = "strangers",
        aggregator: Aggregator | None = None,
        max_share: float = _USUAL.max_share,
        audit: float = _USUAL.audit,
    ) -> None:
        """MatchmakingOptions, AllreduceOptions and AveragerConfig explain the options that are not listed here.

        compression          codec of the tensors; None: no compression. A lossy codec encodes differences from the last
                             average if all members of the group hold the same one; otherwise the tensors travel as they
                             are, without the codec
        state_compression    codec of the state that others download from here; None: no compression. With a lossy codec
                             they do not get every bit
        tensor_infos         key and role of each tensor, by which an adaptive compression chooses a codec; None: the
                             keys are indices. In a downloaded state they always are
        next_chunk_timeout   another name of `sender_timeout`, which goes first
        client_mode          None: as the DHT
        allow_state_sharing  others may download what `get_current_state` returns; None: a peer that is no auxiliary
                             shares while others can reach it, directly or over a relay. It can be set later, as can
                             `state_sharing_priority`
        aggregator           how the members' tensors become one, for example CenteredClip(); None: Mean()
        daemon               False: the process stays alive after its main thread has ended, until `shutdown` is called

        Raises ValueError and TypeError for arguments that make no sense; with `start`, what `run_in_background` raises.
        """
        if client_mode is False and dht.stays_hidden:
            raise ValueError("client_mode=False needs a DHT that others may dial; this one is in client mode")
        patience = next_chunk_timeout if sender_timeout is None else sender_timeout
        codec = NoCompression() if compression is None else compression
        state_codec = NoCompression() if state_compression is None else state_compression
        infos = None if tensor_infos is None else tuple(tensor_infos)
        self.dht = dht
        check_tensors(averaged_tensors)
        check_numbers(shutdown_timeout=shutdown_timeout)
        if allow_state_sharing is None and auxiliary:
            allow_state_sharing = False
        if allow_state_sharing is not None:
            check_flags(allow_state_sharing=allow_state_sharing)
        self._tensors = list(averaged_tensors)
        self._holder: int | None = None  # the thread that is inside get_tensors()
        self.config = AveragerConfig(
            prefix=prefix,
            matchmaking=MatchmakingOptions(target_group_size, min_group_size, min_matchmaking_time, request_timeout),
            allreduce=AllreduceOptions(
                codec,
                infos,
                part_size_bytes,
                allreduce_timeout,
                patience,
                reducer_timeout,
                trust,
                aggregator=Mean() if aggregator is None else aggregator,
                max_share=max_share,
                audit=audit,
            ),
            initial_group_bits=initial_group_bits,
            by_differences=self._by_differences and self._program is None,
            averaging_alpha=averaging_alpha,
            min_vector_size=min_vector_size,
            bandwidth=bandwidth,
            auxiliary=auxiliary,
            client_mode=client_mode,
            share_state=allow_state_sharing,
            state_compression=state_codec,
            declare_state_period=declare_state_period,
        )
        Layout.of(self._tensors, codec, infos)  # tensors that do not fit are refused here, not when it starts
        self._allow_state_sharing, self._state_sharing_priority = allow_state_sharing, 0.0
        self._runner: CoreRunner[AveragerCore] = CoreRunner(
            f"the averager of {prefix!r}", float(shutdown_timeout), daemon=daemon
        )
        if start:
            self.run_in_background()

    # Life

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Starts the averager, which needs a running DHT. Without `await_ready` it returns at once.

        Raises RuntimeError if it was started or shut down before. With `await_ready` it raises ValueError if the DHT's
        peer has an averager of this prefix already, and TimeoutError after `timeout` seconds; then nothing is left
        running.
        """
        self._runner.start(self._make_core, wait=await_ready, timeout=timeout)

    def shutdown(self) -> None:
        """Leaves the rounds under way and ends, within `shutdown_timeout` seconds. Idempotent."""
        self._runner.shutdown()

    @property
    def is_alive(self) -> bool:
        return self._runner.is_alive and self.dht.is_alive()

    def __enter__(self) -> DecentralizedAverager:
        if not self._runner.has_been_started:
            self.run_in_background()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"<DecentralizedAverager {self.prefix!r} {'alive' if self.is_alive else 'not running'}>"

    # Properties

    @property
    def prefix(self) -> str:
        return self.config.prefix

    @property
    def peer_id(self) -> PeerID:
        return self.dht.peer_id

    @property
    def client_mode(self) -> bool:
        """Whether nobody can dial this peer directly, as things stand now; see `client_mode` of the DHT."""
        return bool(self.config.client_mode) or self.dht.client_mode

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
        """Averages the tensors in one round.

        `gather`: a value that msgpack can encode, up to 16 KiB, for all members of the group. `scheduled_time`: swarm
        time before which the group does not begin. `weight`: of this peer's tensors, 1 unless given. `timeout`: seconds
        for finding a group, over all tries. RoundRequest explains `allow_retries` and `require_trigger`.

        Returns the result, a mapping from each member's peer id to its `gather`; None if the round failed or is
        undecided here (logged; the tensors are untouched). With `wait=False` it returns a StepControl at once, whose
        `result()` raises the reason.
        """
        if wait and require_trigger:
            raise ValueError("require_trigger=True needs wait=False: nobody could call allow_allreduce() otherwise")
        if wait and self._holder == threading.get_ident():
            raise RuntimeError("step() would wait for the tensors that this thread holds: leave get_tensors() before")
        if not self.dht.is_alive():
            raise RuntimeError(f"the DHT under the averager of {self.prefix!r} has been shut down")
        request = RoundRequest(
            gather=gather,
            scheduled_time=scheduled_time,
            weight=1.0 if weight is None else weight,
            timeout=timeout,
            allow_retries=allow_retries,
            require_trigger=require_trigger,
            tag=self._tag,
        )
        control: StepControl = self._runner.call(lambda core: core.begin_round(request))
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
        """Exclusive access to the tensors; waits for an all-reduce under way. Changing them in place is fine.

        A round waits for the end of the block: inside it, `step` works with `wait=False` only.
        """
        access: AbstractAsyncContextManager[list[torch.Tensor]] = self._runner.call(lambda core: core.tensors())
        tensors = self._runner.run(lambda _: access.__aenter__())
        self._holder = threading.get_ident()
        try:
            yield tensors
        finally:
            self._holder = None
            self._runner.run(lambda _: access.__aexit__(None, None, None))

    @overload
    def get_group_bits(self, wait: Literal[True] = True) -> str: ...
    @overload
    def get_group_bits(self, wait: Literal[False]) -> SwarmFuture[str]: ...
    def get_group_bits(self, wait: bool = True) -> str | SwarmFuture[str]:
        """The bucket in which this peer looks for its next group."""
        return self._runner.call(lambda core: core.finder.group_bits, wait)

    @overload
    def set_group_bits(self, group_bits: str, wait: Literal[True] = True) -> None: ...
    @overload
    def set_group_bits(self, group_bits: str, wait: Literal[False]) -> SwarmFuture[None]: ...
    def set_group_bits(self, group_bits: str, wait: bool = True) -> SwarmFuture[None] | None:
        """Moves to another bucket from the next round on. Raises ValueError for anything but zeros and ones."""
        return self._runner.call(lambda core: core.finder.set_group_bits(group_bits), wait)

    # State

    def get_current_state(self) -> tuple[Any, Sequence[torch.Tensor]]:
        """The state that others download from here: metadata (anything msgpack carries) and tensors.

        Override it where the state is more than the averaged tensors. When a peer asks for the state, the averager
        calls it in a thread of the executor and then copies the tensors. During the copy no all-reduce of this averager
        changes them. If other code does, the peer gets a state that is half changed.
        """
        with self.get_tensors() as tensors:
            return None, list(tensors)

    @overload
    def load_state_from_peers(
        self, wait: Literal[True] = True, timeout: float | None = None
    ) -> tuple[Any, list[torch.Tensor]] | None: ...
    @overload
    def load_state_from_peers(
        self, wait: Literal[False], timeout: float | None = None
    ) -> SwarmFuture[tuple[Any, list[torch.Tensor]] | None]: ...
    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> Any:
        """Downloads `(metadata, tensors)` from others; nothing here changes. None if nobody gave a state (logged).

        `timeout`: seconds; an hour unless given.
        """
        return self._runner.run(lambda core: self._load_state(core, timeout), wait)

    @property
    def allow_state_sharing(self) -> bool:
        """Whether others may download the state from here, as things stand now. Once it is False, this peer refuses new
        downloads; those under way go on. Set to None, it follows who can reach this peer."""
        if self._allow_state_sharing is None:
            return not self.config.client_mode and self.dht.reachable
        return self._allow_state_sharing

    @allow_state_sharing.setter
    def allow_state_sharing(self, allow: bool | None) -> None:
        if allow is not None:
            check_flags(allow_state_sharing=allow)
        self._allow_state_sharing = allow
        if self._runner.can_be_called:
            self._runner.call(lambda core: core.sharing.share(allow))

    @property
    def state_sharing_priority(self) -> float:
        """Newcomers ask donors of higher priority first. Raises ValueError for more than 1e18 in magnitude."""
        return self._state_sharing_priority

    @state_sharing_priority.setter
    def state_sharing_priority(self, priority: float) -> None:
        check_numbers(state_sharing_priority=priority)
        if not -MOST <= priority <= MOST:
            raise ValueError(f"state_sharing_priority={priority!r}: expected {-MOST:g} to {MOST:g}")
        self._state_sharing_priority = float(priority)
        if self._runner.can_be_called:
            self._runner.call(self._declare)

    # Inside

    async def _load_state(self, core: AveragerCore, timeout: float | None) -> tuple[Any, list[torch.Tensor]] | None:
        try:
            state = await core.sharing.download(timeout)
        except StateDownloadError as error:
            logger.warning("no state of %r: %s", self.prefix, error)
            return None
        if state is None:
            logger.info("nobody shares a state of %r", self.prefix)
            return None
        if not state.exact:
            logger.info(
                "the state of %r came with a lossy codec: it is not equal to its donor's in every bit", self.prefix
            )
        return state.metadata, list(state.tensors.values())

    def _declare(self, core: AveragerCore) -> None:
        core.sharing.declare(StateOffer(self._state_sharing_priority, self._state_epoch, self._tag))

    async def _make_core(self) -> AveragerCore:
        async def get_state() -> tuple[Any, Sequence[torch.Tensor]]:
            metadata, tensors = _checked_state(await offload(self.get_current_state))
            return metadata, await core.copied(tensors)

        config = replace(self.config, share_state=self._allow_state_sharing)
        core = AveragerCore(self._tensors, self.dht.node, config, get_state=get_state, program=self._program)
        self._declare(core)
        await core.start()
        return core


def _checked_state(state: object) -> tuple[Any, Sequence[torch.Tensor]]:
    """Returns the value that `get_current_state` returned. Raises TypeError unless that is metadata and tensors."""
    if not isinstance(state, tuple) or len(state) != 2:
        given = f"{len(state)} values" if isinstance(state, tuple) else type(state).__name__
        raise TypeError(
            f"get_current_state() must return (metadata, tensors), got {given}; hivemind's third value is the argument "
            "tensor_infos here"
        )
    metadata, tensors = state
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"get_current_state(): tensors[{index}] must be a tensor, got {type(tensor).__name__}")
    return metadata, tensors
