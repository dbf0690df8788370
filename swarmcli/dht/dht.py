"""DHT: the hash table for programs without coroutines. A thin shell over DHTNode on the process's loop thread."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, overload

from swarmcli.clock import Clock, set_default_clock
from swarmcli.dht.joining import join
from swarmcli.dht.node import DHTNode
from swarmcli.dht.records import OwnedSubkey, Subkey, ValueWithExpiration
from swarmcli.dht.schema import RecordValidator
from swarmcli.errors import SwarmError
from swarmcli.events import Events
from swarmcli.hivemind_names import names_new_words
from swarmcli.network.context import Traffic
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.loop_thread import LoopThread, SwarmFuture
from swarmcli.network.membership import Membership
from swarmcli.network.rates import check_rates
from swarmcli.network.transports.tcp.transport import TCPTransport
from swarmcli.reach.mapping import PortMapping
from swarmcli.reach.reach import Reach
from swarmcli.reach.relaying import RelayBudgets

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnTheLoop: TypeAlias = "Coroutine[Any, Any, T] | Callable[[DHT, DHTNode], Awaitable[T]]"


class DHT:
    """A peer of the swarm: an identity, an endpoint that listens, and a node of the hash table.

    Every call may come from any thread but the loop's own; with `return_future=True` it returns at once with a
    future that may be waited for, or awaited from asyncio.
    """

    @names_new_words("DHT")
    def __init__(
        self,
        initial_peers: Sequence[str] | None = None,
        *,
        start: bool,
        client_mode: bool = False,
        host: str = "",
        port: int = 0,
        preferred_port: int = 0,
        announce_addresses: Sequence[str] = (),
        identity_path: str | os.PathLike[str] | None = None,
        identity: Identity | None = None,
        record_validators: Iterable[RecordValidator] = (),
        num_replicas: int = 5,
        cache_locally: bool = True,
        port_mapping: bool = True,
        relay: bool = False,
        relay_rate: float | None = None,
        startup_timeout: float = 15,
        further_peers: Callable[[], Iterable[str]] = tuple,
        events: Events | None = None,
        shutdown_timeout: float = 3,
        await_ready: bool = True,
    ) -> None:
        """`initial_peers` are addresses of peers that are there already (tcp://host:port/peerid); none: a new network.
        `port` 0: `preferred_port` if that is free, else any free one. `startup_timeout` infinite: the start goes on
        until a first contact answers, and asks `further_peers` now and then for more addresses. `relay`: this peer, if
        it can be dialed, relays for peers that cannot dial each other, with at most `relay_rate` bytes per second.
        `identity`: instead of a path; the DHT closes it. `events`: where the DHT emits them; None: its own.

        Raises IdentityError for a key file that cannot be used; with `start` and `await_ready` also what
        `run_in_background` raises. Times are seconds.
        """
        for name, addresses in (("initial_peers", initial_peers or ()), ("announce_addresses", announce_addresses)):
            if isinstance(addresses, str):
                raise TypeError(f"{name} is a sequence of addresses, got the str {addresses!r}")
        self._shutdown_timeout = float(shutdown_timeout)
        self.stays_hidden = client_mode  # whether the user wants nobody to dial this peer directly
        self._listening: dict[str, Any] = {"host": host, "port": port, "preferred_port": preferred_port}
        self._announce = tuple(announce_addresses)
        budgets = RelayBudgets() if relay_rate is None else RelayBudgets.with_rate(relay_rate)
        self._joining: dict[str, Any] = {
            "relays_within": budgets if relay else None,
            "mapping": PortMapping if port_mapping else None,
            "initial_peers": tuple(str(address) for address in initial_peers or ()),
            "num_replicas": num_replicas,
            "cache_locally": cache_locally,
            "record_validators": list(record_validators),
            "startup_timeout": float(startup_timeout),
            "further_peers": further_peers,
        }
        if identity is None:
            identity = Identity.generate() if identity_path is None else Identity.load_or_create(Path(identity_path))
        self._identity = identity
        self.membership: Membership | None = None  # of a closed run; set before the peer starts
        self._rates: tuple[float | None, float | None] = (None, None)
        self._endpoint: Endpoint | None = None
        self._thread: LoopThread | None = None
        self._opening: SwarmFuture[DHTNode] | None = None
        self._opener: asyncio.Task[Any] | None = None
        self._node: DHTNode | None = None
        self._reach: Reach | None = None
        self._ends = AsyncExitStack()
        self._closed = False
        self.events = Events() if events is None else events
        self.clock = Clock()
        if start:
            self.run_in_background(await_ready=await_ready)

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Starts the peer. With `await_ready` returns once it has found the network.

        Raises BootstrapError when no first contact answered, ListenError when it cannot listen, AddressError for an
        address that cannot be read, TimeoutError after `timeout` seconds. After an error nothing is left running.
        """
        if self._closed or self._thread is not None:
            raise RuntimeError("this DHT has been shut down" if self._closed else "this DHT has been started already")
        self._thread = LoopThread.acquire()
        self._opening = self._thread.submit(self._open())
        if not await_ready:
            return
        try:
            self._opening.result(timeout)
        except SwarmError as error:
            self.shutdown()
            raise error.with_traceback(None) from None  # it says all; where on the loop it arose helps nobody
        except (Exception, KeyboardInterrupt):
            self.shutdown()
            raise

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Returns once the peer has found the network. Raises TimeoutError after `timeout` seconds (the start then goes
        on), what `run_in_background` raises for other errors, and RuntimeError if the peer was not started."""
        if self._closed or self._opening is None:
            raise RuntimeError("this DHT is not running; start it with run_in_background()")
        self._opening.result(timeout)

    def limit_rates(self, upload: float | None, download: float | None) -> None:
        """From now on this peer sends and receives at most so many bytes per second (None: no limit), see
        Endpoint.limit_rates. May be called before the start. Raises ValueError."""
        check_rates(upload, download)
        self._rates = upload, download
        if self._thread is not None and not self._closed:
            self._thread.run(self._limit_rates())

    async def _limit_rates(self) -> None:
        if self._endpoint is not None:
            self._endpoint.limit_rates(*self._rates)

    @property
    def reachable(self) -> bool:
        """Whether others can reach this peer as things stand now, directly or over a relay."""
        return self._node is not None and bool(self._node.endpoint.addresses)

    @property
    def peer_id(self) -> PeerID:
        """The id of this peer."""
        return self._identity.peer_id

    @property
    def identity(self) -> Identity:
        """The key by which this peer proves its id. The DHT closes it."""
        return self._identity

    @property
    def node(self) -> DHTNode:
        """The node itself, for coroutines on the loop thread. RuntimeError before it is ready and after the end."""
        if self._node is None:
            raise RuntimeError("this DHT is not running")
        return self._node

    @property
    def endpoint(self) -> Endpoint:
        """The network endpoint that everything of this peer shares."""
        return self.node.endpoint

    @property
    def client_mode(self) -> bool:
        """Whether nobody can dial this peer directly, by its user's wish or as it has found out. It may change; until
        the peer is ready, it is the user's wish."""
        return self.stays_hidden if self._node is None else self._node.client_mode

    @property
    def reach(self) -> Reach:
        """Knows whether others can dial this peer. RuntimeError as for `node`."""
        if self._reach is None or self._node is None:
            raise RuntimeError("this DHT is not running")
        return self._reach

    @property
    def moved(self) -> Mapping[str, Traffic]:
        """Bytes that this peer has sent and received, see Endpoint.moved. From any thread."""
        return {} if self._node is None else self._node.endpoint.moved

    def is_alive(self) -> bool:
        """Whether the peer is up."""
        return self._node is not None and not self._closed

    def get_visible_addresses(self) -> list[str]:
        """Where others can dial this peer, in the form that `initial_peers` takes; empty while nobody can, which may
        change. Without addresses over relays: a newcomer that knows nobody cannot find the relay."""
        return [f"{address}/{self.peer_id.text}" for address in self.endpoint.direct_addresses]

    get_visible_maddrs = get_visible_addresses

    @overload
    def store(
        self, key: str, value: Any, expiration_time: float, subkey: Subkey = None, return_future: Literal[False] = False
    ) -> bool: ...
    @overload
    def store(
        self, key: str, value: Any, expiration_time: float, subkey: Subkey = None, *, return_future: Literal[True]
    ) -> SwarmFuture[bool]: ...
    def store(
        self, key: str, value: Any, expiration_time: float, subkey: Subkey = None, return_future: bool = False
    ) -> bool | SwarmFuture[bool]:
        """See DHTNode.store: whether at least one replica holds the value now."""
        return self._do(lambda node: node.store(key, value, expiration_time, subkey), return_future)

    @overload
    def get(
        self, key: str, latest: bool = False, return_future: Literal[False] = False
    ) -> ValueWithExpiration | None: ...
    @overload
    def get(
        self, key: str, latest: bool = False, *, return_future: Literal[True]
    ) -> SwarmFuture[ValueWithExpiration | None]: ...
    def get(
        self, key: str, latest: bool = False, return_future: bool = False
    ) -> ValueWithExpiration | SwarmFuture[ValueWithExpiration | None] | None:
        """See DHTNode.get; with subkeys the value is a dictionary subkey → ValueWithExpiration."""
        return self._do(lambda node: node.get(key, latest), return_future)

    def own_subkey(self, name: bytes = b"") -> OwnedSubkey:
        """A subkey that only this peer can write."""
        return OwnedSubkey(self.peer_id, name)

    def withdraw(self, key: str, subkey: OwnedSubkey, return_future: bool = False) -> bool | SwarmFuture[bool]:
        """See DHTNode.withdraw: takes back what this peer stored under one of its own subkeys."""
        return self._do(lambda node: node.withdraw(key, subkey), return_future)

    def add_validators(self, record_validators: Iterable[RecordValidator]) -> None:
        """More rules for records, from now on."""
        validators = list(record_validators)

        async def add(node: DHTNode) -> None:
            node.add_validators(validators)

        self._do(add, False)

    @overload
    def run_coroutine(self, coroutine: OnTheLoop[T], return_future: Literal[False] = False) -> T: ...
    @overload
    def run_coroutine(self, coroutine: OnTheLoop[T], return_future: bool) -> T | SwarmFuture[T]: ...
    def run_coroutine(self, coroutine: OnTheLoop[T], return_future: bool = False) -> T | SwarmFuture[T]:
        """Runs a coroutine, or a function of this DHT and its node that returns one, on the loop thread."""
        if isinstance(coroutine, Coroutine):
            return self._deliver(coroutine, return_future)
        function = coroutine
        return self._do(lambda node: function(self, node), return_future)

    def shutdown(self) -> None:
        """Says goodbye and ends everything of this peer, within `shutdown_timeout` seconds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._thread is not None:
                self._thread.run(self._close(), self._shutdown_timeout)
        except TimeoutError:
            logger.warning("this peer did not come to its end within %g s and was cut off", self._shutdown_timeout)
        finally:
            if self._thread is not None:
                self._thread.release()
            self._identity.close()

    def __enter__(self) -> DHT:
        if self._thread is None:
            self.run_in_background()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._node is not None else "not ready"
        return f"<DHT {self.peer_id.short} {state}>"

    async def _open(self) -> DHTNode:
        self._opener = asyncio.current_task()
        transport = TCPTransport(self._identity, **self._listening)
        endpoint = Endpoint(
            transport,
            clock=self.clock,
            client_mode=self.stays_hidden,
            announce=self._announce,
            events=self.events,
            membership=self.membership,
        )
        self._endpoint = endpoint
        endpoint.limit_rates(*self._rates)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(endpoint.close)
            await endpoint.start()
            set_default_clock(self.clock)
            node, reach = await join(endpoint, undo, **self._joining)
            self._ends = undo.pop_all()
        self._reach, self._node = reach, node
        return node

    async def _close(self) -> None:
        if self._opener is not None and not self._opener.done():
            self._opener.cancel()
            await asyncio.wait([self._opener])
        self._node = None
        await self._ends.aclose()

    def _do(self, action: Callable[[DHTNode], Awaitable[T]], return_future: bool) -> Any:
        return self._deliver(self._with_node(action), return_future)

    async def _with_node(self, action: Callable[[DHTNode], Awaitable[T]]) -> T:
        if self._node is None and self._opening is not None:
            await asyncio.shield(asyncio.wrap_future(self._opening))
        return await action(self.node)

    def _deliver(self, coroutine: Coroutine[Any, Any, T], return_future: bool) -> Any:
        if self._thread is None or self._closed:
            coroutine.close()
            raise RuntimeError("this DHT is not running; start it with run_in_background()")
        return self._thread.submit(coroutine) if return_future else self._thread.run(coroutine)
