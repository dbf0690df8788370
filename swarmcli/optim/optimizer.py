"""Optimizer: a torch optimizer whose steps a swarm takes together. The shell of OptimizerCore for other threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import torch

from swarmcli.averaging.checks import as_count, check_flags
from swarmcli.averaging.shell import CoreRunner
from swarmcli.compression import CompressionBase, NoCompression
from swarmcli.errors import IdentityError, OptimizerError
from swarmcli.hivemind_names import names_new_words
from swarmcli.network.identity import PeerID
from swarmcli.optim.arguments import averager_config, choose_timing, clipping, make_scheduler, place_optimizer
from swarmcli.optim.auxiliary import AuxiliaryCore
from swarmcli.optim.config import OptimizerConfig, PeerContext, PeerDescription, RefreshOptions
from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.epoch.seat import SeatLost
from swarmcli.optim.frameworks import look_at_callers, refuse_partial_sums
from swarmcli.optim.grad_scaler import GradScaler, ScaledSteps, check_grad_scaler, refuse_plain_scaler
from swarmcli.optim.gradients.accumulator import GradientAccumulator, Weighed
from swarmcli.optim.gradients.grad_averager import GradientAverager
from swarmcli.optim.modes import Outer, choose_mode
from swarmcli.optim.modes.base import StateOptions, Trained
from swarmcli.optim.peers.progress import GlobalTrainingProgress, LocalTrainingProgress
from swarmcli.optim.peers.report import PeerReport
from swarmcli.optim.state.averaging import state_slots
from swarmcli.optim.state.frozen import TERM, FrozenWeights, base_of, frozen_of
from swarmcli.optim.state.frozen import Parameters as FrozenParameters
from swarmcli.optim.state.training_state import OptimizerFactory, Parameters, Scheduler, SchedulerFactory

if TYPE_CHECKING:
    from swarmcli.dht import DHT

T = TypeVar("T")


class Optimizer(torch.optim.Optimizer):
    """Wraps the user's optimizer: with default options the same as synchronous training with `target_batch_size`.

    An *epoch* is the time in which all peers together process `target_batch_size` samples, not a pass over the data.
    The scheduler steps once per epoch.

    `optimizer` is a torch optimizer, or a factory that makes one of `params`; `scheduler` is an object too, or a
    factory that takes the optimizer. Waiting in any method may be interrupted (KeyboardInterrupt); the end of an epoch
    that is under way then goes on by itself. As a context manager it leaves the run at the block's end.
    """

    # Torch's plain GradScaler hands itself to the `step` of such an optimizer, or sets `grad_scale`, and leaves the
    # gradients alone. For any other it unscales the gradients at each batch: in reused buffers the same ones
    # repeatedly.
    _step_supports_amp_scaling = True
    grad_scale = property(fset=refuse_plain_scaler)

    @names_new_words("Optimizer")
    def __init__(
        self,
        *,
        dht: DHT,
        run_id: str,
        target_batch_size: int,
        batch_size_per_step: int | None = None,
        optimizer: torch.optim.Optimizer | OptimizerFactory,
        params: Parameters | None = None,
        scheduler: Scheduler | SchedulerFactory | None = None,
        matchmaking_time: float = 15.0,
        averaging_timeout: float = 60.0,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        load_state_timeout: float = 600.0,
        reuse_grad_buffers: bool = False,
        offload_optimizer: bool | None = None,
        delay_optimizer_step: bool | None = None,
        delay_grad_averaging: bool = False,
        delay_state_averaging: bool = True,
        average_state_every: int | None = None,
        client_mode: bool | None = None,
        auxiliary: bool = False,
        grad_compression: CompressionBase = NoCompression(),  # noqa: B008  # codecs have no state
        grad_averager: Callable[..., Any] | None = GradientAverager,
        outer: Outer | None = None,
        use_ext_grad_buffer: bool = False,
        state_averaging_compression: CompressionBase = NoCompression(),  # noqa: B008
        load_state_compression: CompressionBase = NoCompression(),  # noqa: B008
        average_opt_statistics: Sequence[str] = (),
        extra_tensors: Sequence[torch.Tensor] = (),
        max_grad_norm: float | None = None,
        frozen_parameters: FrozenParameters | FrozenWeights | None = None,
        frozen_digest: str = "",
        frozen_directory: Path | None = None,
        averager_opts: Mapping[str, Any] | None = None,
        tracker_opts: Mapping[str, Any] | None = None,
        performance_ema_alpha: float = 0.1,
        shutdown_timeout: float = 5.0,
        verbose: bool = False,
        description: PeerDescription | None = None,
        fingerprint: Mapping[str, str] | None = None,
        make_accumulator: Callable[..., GradientAccumulator] = GradientAccumulator,
    ) -> None:
        """Makes the peer known to the run; it joins at its first step, or when `load_state_from_peers` is called.

        Times are seconds and upper bounds. docs/optimizer.md tells what each argument does; of some it says little:
        description        what people see of this peer
        fingerprint        key on which the peers of a run must agree → hash; groups refuse a peer with another one
        frozen_parameters  the model's parameters; those count that are not trained
        frozen_digest      of the run's; a peer whose own have another one downloads them
        make_accumulator   makes what sums the gradients; a process of a site has another one

        Raises ValueError or TypeError, which name the argument, for what cannot work together.
        """
        check_flags(auxiliary=auxiliary, delay_state_averaging=delay_state_averaging, verbose=verbose)
        if isinstance(extra_tensors, torch.Tensor) or isinstance(average_opt_statistics, str):
            raise TypeError("extra_tensors and average_opt_statistics: expected lists, of tensors and of names")
        if auxiliary and batch_size_per_step is not None:
            raise ValueError("batch_size_per_step: an auxiliary computes no batches")
        if batch_size_per_step is not None:
            batch_size_per_step = as_count(batch_size_per_step, "batch_size_per_step", least=1)
        timing, offload = choose_timing(
            optimizer,
            params,
            offload=offload_optimizer,
            delayed_step=delay_optimizer_step,
            delayed_averaging=delay_grad_averaging,
            outer=outer is not None,
        )
        of_averager = dict(averager_opts or {})
        of_states = {"tolerance": of_averager.pop("state_tolerance")} if "state_tolerance" in of_averager else {}
        proceed_alone = of_averager.pop("proceed_alone", False)
        if verbose:
            logging.basicConfig()  # to stderr; without effect where the program has set up logging
            package = logging.getLogger(__package__)
            package.setLevel(min(package.getEffectiveLevel(), logging.INFO))
        config = OptimizerConfig(
            run_id=run_id,
            target_batch_size=target_batch_size,
            matchmaking_time=matchmaking_time,
            averaging_timeout=averaging_timeout,
            load_state_timeout=load_state_timeout,
            description=description or PeerDescription(role="auxiliary" if auxiliary else "trainer"),
            fingerprint=dict(fingerprint or {}),
            client_mode=client_mode,
            tracker=RefreshOptions(**(tracker_opts or {})),
            performance_ema_alpha=performance_ema_alpha,
            proceed_alone=proceed_alone,
            verbose=verbose,
        )
        averaging = averager_config(
            config,
            auxiliary=auxiliary,
            allreduce_timeout=allreduce_timeout,
            next_chunk_timeout=next_chunk_timeout,
            compression=grad_compression,
            options=of_averager,
        )
        self.mode = choose_mode(
            grad_averager,
            outer,
            timing=timing,
            reuse_grad_buffers=reuse_grad_buffers,
            share_gradients=use_ext_grad_buffer,
            target_group_size=averaging.matchmaking.target_group_size,
            state=StateOptions(
                average_every=average_state_every,
                delay=delay_state_averaging,
                statistics=tuple(average_opt_statistics),
                compression=state_averaging_compression,
                load_compression=load_state_compression,
                **of_states,
            ),
        )
        self.dht, self.run_id, self.auxiliary, self.batch_size_per_step = dht, run_id, auxiliary, batch_size_per_step
        # Of an auxiliary's parameters only the shapes count.
        self.opt, placement = place_optimizer(optimizer, params, offload=offload and not auxiliary)
        self.scheduler = make_scheduler(scheduler, self.opt, optimizer)
        if max_grad_norm is not None:
            if outer is not None or self.mode.local:
                raise ValueError("max_grad_norm: it clips the average gradient, and with local or outer steps is none")
            self.opt.register_step_pre_hook(clipping(max_grad_norm))
        self._parameters = placement.model_parameters
        self._devices = {tensor.device for tensor in [*self._parameters, *extra_tensors] if tensor.is_cuda}
        frozen = self._frozen(frozen_parameters, frozen_digest, frozen_directory, extra_tensors)
        if self.frozen_digest:
            config = replace(config, fingerprint={TERM: self.frozen_digest, **config.fingerprint})
        peer = PeerContext(dht.node, config, averaging)
        self._core: OptimizerCore | AuxiliaryCore
        self.scaled_steps: ScaledSteps | None = None  # an auxiliary takes none
        if auxiliary:
            states = list(state_slots(self._parameters, self.opt, self.mode.state.statistics, extra_tensors))
            self._core = AuxiliaryCore(peer, self._parameters, self.mode, states, extra_tensors)
        else:
            trained = Trained(self.opt, self.scheduler, extra_tensors, placement, frozen, make_accumulator)
            self._core = core = OptimizerCore(peer, trained, self.mode)
            self.scaled_steps = ScaledSteps(core, self._parameters, self._run, gradients_are_sums=reuse_grad_buffers)
        # What others report, whose claims count, and how far the epoch is. Any thread may look.
        self.directory, self.claims, self.tracker = self._core.directory, self._core.claims, self._core.tracker
        self._stepping, self._stepped = threading.Lock(), False
        self._runner: CoreRunner[OptimizerCore | AuxiliaryCore] = CoreRunner("the optimizer", shutdown_timeout)
        self._runner.start(self._begin, wait=True, timeout=None)

    async def _begin(self) -> OptimizerCore | AuxiliaryCore:
        try:
            await self._core.start()
        except BaseException:
            await self._core.shutdown()
            raise
        return self._core

    def _frozen(
        self,
        named: FrozenParameters | FrozenWeights | None,
        digest: str,
        directory: Path | None,
        averaged: Sequence[torch.Tensor],
    ) -> FrozenWeights | None:
        """The frozen weights; None for an auxiliary that is told the digest, or has no values to compute it from."""
        self.frozen_digest = digest
        if self.auxiliary and (digest or any(parameter.is_meta for parameter in self._parameters)):
            return None
        if isinstance(named, FrozenWeights):
            frozen = named
        else:
            frozen = frozen_of(self._parameters, named or (), digest, directory, averaged)
            if named is None and not (frozen.digest or self.auxiliary):
                frozen.base = base_of(self._parameters)
        self._devices |= {tensor.device for tensor in frozen.tensors.values() if tensor.is_cuda}
        self.frozen_digest = frozen.digest
        return frozen

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        grad_scaler: GradScaler | None = None,
        weight: float | None = None,
    ) -> Any:
        """Adds the present gradients, means over `batch_size` samples (None: `batch_size_per_step`).

        `weight`: what they are a mean over, if that is no number of samples, such as the tokens that count. In the
        average each peer's gradients have their weight (None: the batch size), while samples make up the epoch.

        When the swarm has enough samples, the gradients are averaged and the optimizer steps; then `local_epoch` has
        changed. Otherwise the call waits for nobody. With a `closure` it returns and notes the loss. With
        `batch_size=0` it adds nothing, waits about a second for the epoch's end, and takes part in it (a follower calls
        this in a loop). An auxiliary calls `step()`, which waits and assists in the same way.

        `grad_scaler`: the gradients are of losses that it scaled (`grad_scaler.step(optimizer)` calls this). If one is
        not finite, this peer drops what it has accumulated; the others go on.

        Raises GradScalerError for a batch without a scaler after one with it; OptimizerError for torch's plain scaler,
        for a second thread, and after `shutdown`; IdentityError if another process has this peer's key, and was there
        first.
        """
        if not self._stepping.acquire(blocking=False):
            raise OptimizerError("another thread is in step(): one at a time")
        try:
            if self.dht.is_alive() and (why := self.dht.node.endpoint.gave_way):
                raise IdentityError(why)
            return self._step(closure, batch_size, grad_scaler, weight)
        finally:
            self._stepping.release()

    def _step(
        self, closure: Callable[[], Any] | None, batch_size: int | None, grad_scaler: Any, weight: float | None
    ) -> Any:
        if grad_scaler is not None:
            check_grad_scaler(grad_scaler)
        if isinstance(self._core, AuxiliaryCore):
            if any(each is not None for each in (closure, batch_size, grad_scaler, weight)):
                raise OptimizerError("an auxiliary only assists: its step takes no closure, batch size, weight, scaler")
            self._run(lambda core: core.step())
            return None
        refuse_partial_sums()
        if not self._stepped:
            look_at_callers(self, self._parameters)
        samples = self.batch_size_per_step if batch_size is None else batch_size
        if samples is None:
            raise ValueError("batch_size: give the number of samples here, or batch_size_per_step at creation")
        batch = Weighed.of(samples, weight) if (samples := as_count(samples, "batch_size")) else Weighed()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if loss is not None and batch.weight:  # as in torch, a closure may return nothing: Lightning's does
                self._core.metrics.note_loss(float(torch.as_tensor(loss).detach()), batch.weight)
        assert self.scaled_steps is not None
        if grad_scaler is None and not self.scaled_steps.begun:
            self._run(lambda core: core.step(samples, weight=batch.weight))
        else:
            self.scaled_steps.step(batch, grad_scaler)
        self._stepped = True
        return loss

    def note_loss(self, loss: float, samples: float) -> None:
        """For loops without a closure: tells the others the mean loss over `samples` samples, or tokens if these are
        the weights of `step`. It is only shown, not averaged."""
        self.core.metrics.note_loss(loss, samples)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zeroes the gradients of the model's parameters. Raises OptimizerError with reuse_grad_buffers, where the
        gradients are the sums of the epoch."""
        if self.mode.reuse_grad_buffers:
            raise OptimizerError("zero_grad: with reuse_grad_buffers the gradients are the sums of the epoch so far")
        for parameter in self._parameters:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad = parameter.grad.detach().zero_()

    # what torch's schedulers, trainers and hooks see: groups, statistics and hooks of the user's optimizer, which steps
    # once per epoch

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
        """Raises TypeError: torch's own way would leave every Optimizer of the process broken."""
        raise TypeError("an Optimizer belongs to its process and peer, it is not copied or pickled: use state_dict()")

    # the core, for what the methods below do not offer

    @property
    def core(self) -> OptimizerCore:
        """The core of a trainer or follower. It belongs to the loop's thread: other threads only look, or use `call` to
        change it. Raises OptimizerError for an auxiliary."""
        if isinstance(self._core, AuxiliaryCore):
            raise OptimizerError("an auxiliary holds no parameters and computes no progress")
        return self._core

    @overload
    def call(self, action: Callable[[OptimizerCore], Coroutine[Any, Any, T]]) -> T: ...
    @overload
    def call(self, action: Callable[[OptimizerCore], T]) -> T: ...
    def call(self, action: Callable[[OptimizerCore], Any]) -> Any:
        """Calls `action` with the core on the loop's thread; returns its result, awaited if it is a coroutine. Raises
        OptimizerError for an auxiliary, and after this optimizer or its DHT has been shut down."""

        async def act(core: OptimizerCore) -> Any:
            result = action(core)
            return await result if isawaitable(result) else result

        _ = self.core  # there is none for an auxiliary
        return self._run(act)

    # where this peer and the swarm stand

    @property
    def local_epoch(self) -> int:
        """The epochs since the run began that are in this peer's parameters."""
        return self._core.position.epoch

    @property
    def local_progress(self) -> LocalTrainingProgress:
        return self.core.tracker.local_progress

    @property
    def global_progress(self) -> GlobalTrainingProgress:
        return self._core.tracker.global_progress

    @property
    def use_local_updates(self) -> bool:
        """Whether this peer steps at every call, and the parameters are averaged instead of the gradients."""
        return self.mode.local

    @property
    def use_gradient_averaging(self) -> bool:
        return not self.mode.local

    @property
    def is_averaging(self) -> bool:
        """Whether an epoch is being ended at this moment."""
        return self._core.is_averaging

    def report(self) -> PeerReport:
        """Returns this peer's own report."""
        return self._core.report()

    def peers(self) -> Mapping[PeerID, PeerReport]:
        """Returns the last reports of the other peers; their texts are strangers'."""
        return dict(self._core.directory.others)

    def is_synchronized_with_peers(self) -> bool:
        """Whether no other lineage leads, as the others last reported. Raises OptimizerError as `call` does."""
        return self.call(lambda core: not core.reason_to_look())

    def load_state_from_peers(self) -> bool:
        """Joins the run if need be. Returns whether this peer's state changed for that. Raises StateDownloadError if no
        donor gave a state, FingerprintError if the others refuse this peer."""
        return self.call(lambda core: core.join())

    def linger(self, until_others_at: int, timeout: float) -> bool:
        """Hands out the state until nobody who can be reached is behind that epoch, for `timeout` seconds at most.
        Returns False if time was up. See OptimizerCore.linger."""
        return self.call(lambda core: core.linger(until_others_at, timeout))

    def state_digest(self) -> str:
        """SHA-256 over the parameters: equal for peers that hold them bit-identically."""
        return self.core.replica.state.digest()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with scheduler, epoch and lineage under "swarm". See OptimizerCore.state_dict."""
        return self.call(lambda core: core.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`; restore the model's parameters first. See OptimizerCore.load_state_dict."""
        self.call(lambda core: core.load_state_dict(state_dict))

    # pausing

    def pause(self, *, leaving: bool = False) -> None:
        """From now on this peer computes nothing: the others hear of it at once, and no round waits for it to compute.

        Any thread may call it, even while another one computes a batch or waits in `step`: a download or a wait for the
        run ends. Returns at once. The loop goes on to call `step`, first with the batch that was under way, then with
        `batch_size=0`: such steps bring what was computed to the round that ends the epoch, and without them nothing is
        handed in. `has_handed_in` says when that is over. `leaving`: others hear that this peer will not come back.
        """
        self._soon(lambda core: core.pause(leaving=leaving))

    def resume(self) -> None:
        """Ends a pause; any thread may call it. Before its next batch the loop calls `load_state_from_peers`, which
        brings the model to where the run is by then."""
        self._soon(lambda core: core.resume())

    @property
    def seat_lost(self) -> SeatLost | None:
        """Why this trainer's samples cannot count at present, in figures; None: they can. Meanwhile this peer only
        follows the run, and drops what it computes: the loop calls `step(batch_size=0)` instead. From any thread."""
        return None if self.auxiliary else self.core.seat.lost

    def review_seat(self, divided: float = 1.0) -> SeatLost | None:
        """Finds out at once whether this trainer's samples can count, as after a change of its limits, and returns
        `seat_lost`. Without it the next step finds out. `divided`: the user's limit divided by this peer's part of it.
        From any thread but the loop's; without effect after `shutdown`."""

        def review(core: OptimizerCore) -> None:
            core.seat.divided = divided
            core.seat.review_in_run()

        with suppress(RuntimeError, OptimizerError):  # the loop has ended, or an auxiliary has no seat
            self.call(review)
        return self.seat_lost

    @property
    def seconds_to_send(self) -> float:
        """Seconds that sending takes in each round within the user's limits; 0: there are none. From any thread."""
        return 0.0 if self.auxiliary else self.core.seat.seconds

    @property
    def downloading(self) -> str:
        """The download that brings this peer into step, in words: how much it is, how far, how long it takes; "": there
        is none. From any thread."""
        if self.auxiliary:
            return ""
        return self.core.frozen.on_its_way or self.core.exchange.on_its_way

    @property
    def round_bytes(self) -> int:
        """Bytes that a trainer sends in each round, and receives; 0: an auxiliary does not know it."""
        return 0 if self.auxiliary else self.core.seat.nbytes

    @property
    def has_handed_in(self) -> bool:
        """For a peer that pauses: whether nothing that it has computed is on its way to a round, or can soon be.

        If nobody else computes, it keeps its samples (`local_progress`), and they count when the run goes on.
        """
        return self._core.has_handed_in

    def _soon(self, action: Callable[[OptimizerCore | AuxiliaryCore], None]) -> None:
        """Calls `action` on the loop, after all earlier calls. Without effect once this optimizer has been shut
        down."""
        with suppress(RuntimeError):  # it has been shut down, or the loop has ended
            self._runner.call(action, wait=False)

    # life

    def is_alive(self) -> bool:
        return self._runner.is_alive and self.dht.is_alive()

    def shutdown(self) -> None:
        """Leaves the run and withdraws what this peer said about itself. The DHT keeps running. Idempotent."""
        self._runner.shutdown()

    def __enter__(self) -> Optimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"<swarm Optimizer of {self.run_id!r} at epoch {self.local_epoch} around {type(self.opt).__name__}>"

    def _run(self, action: Callable[[Any], Awaitable[T]]) -> T:
        if not self.is_alive():
            raise OptimizerError(
                f"{'the DHT under it' if self._runner.is_alive else 'this optimizer'} has been shut down"
            )
        with in_order(self._devices):
            done: T = self._runner.run(action)
            return done


@contextmanager
def in_order(devices: Iterable[torch.device], cuda: Any = torch.cuda) -> Iterator[None]:
    """Orders the work of other threads on these CUDA devices: what they do for the block comes after all that this
    thread has given to the devices so far, and before what it gives to them afterwards.

    Other threads work on a device's default stream. A loop may compute on a stream of its own, and neither of the two
    waits for the other: gradients would be read before they are there. `cuda`: a double in tests.
    """
    pairs = [(cuda.current_stream(device), cuda.default_stream(device)) for device in devices]
    pairs = [(own, others) for own, others in pairs if own != others]
    for own, others in pairs:
        others.wait_event(own.record_event())
    try:
        yield
    finally:
        for own, others in pairs:
            own.wait_event(others.record_event())
