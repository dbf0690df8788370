"""Coming into the network: all first contacts are tried side by side, and again, until one of them answers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from swarmcli.dht.core import CALL_TIMEOUT, NodeCore
from swarmcli.errors import BootstrapError, CallTimeout, NotAMember, OwnAddressError, SwarmError, WrongPeerError
from swarmcli.events import Noticed
from swarmcli.network.addresses import parse_address, place_of
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time

MOST_TOLD = 4  # of the addresses that do not answer
MOST_ADDRESSES = 64  # known ones, above which a search without an end takes no further ones


# Seconds
FIRST_PAUSE = 0.1  # between two attempts at one address; it doubles …
LONGEST_PAUSE = 1.0  # … up to this, since a person who starts several peers is watching …
PATIENT_SHARE = 0.1  # … or up to this share of the time that a search without an end has taken …
CALMEST_PAUSE = 15.0  # … but never beyond: a peer that is back is found within this time
LOOK = 5.0  # between two looks for others who could answer by now
TELL = 5.0  # until a search without an end first says whom it tries; then whenever its time has doubled
QUIET = 3600.0  # … and at least so often
ALONE = 30.0  # after which a node that is itself a first contact begins without the others


class FirstContacts:
    """One search for somebody who answers."""

    def __init__(
        self,
        core: NodeCore,
        timeout: float,
        others: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """`timeout`: seconds; infinity: the search goes on until somebody answers, and then `others` is asked now and
        then for addresses that were not known before."""
        self._core, self._timeout, self._others = core, timeout, others
        self._patient = math.isinf(timeout)
        self._began = loop_time()
        self._since = core.now()
        self._tell_at = self._began + TELL
        self._found: dict[str, PeerID | None] = {}
        self._failures: dict[str, SwarmError] = {}

    async def find(self, addresses: Sequence[str]) -> dict[str, PeerID | None]:
        """Returns the peer that each address led to; None: nobody yet.

        Raises AddressError for an address that cannot be read, and BootstrapError, with what failed last at each
        address, when none has answered in time or each has refused for good. A node whose only first contact is itself
        is alone, which is no error.
        """
        first = self._new(addresses)
        async with asyncio.TaskGroup() as group:
            waiting = {group.create_task(self._keep_trying(each)) for each in first}
            answered = not waiting
            try:
                async with asyncio.timeout(None if self._patient else self._timeout):
                    while waiting and not answered:
                        look = LOOK if self._patient else None
                        done, waiting = await asyncio.wait(waiting, timeout=look, return_when=asyncio.FIRST_COMPLETED)
                        answered = any(task.result() for task in done)
                        if self._patient and not (answered := answered or self._met()):
                            new = self._new(islice(self._others(), max(0, MOST_ADDRESSES - len(self._found))))
                            waiting |= {group.create_task(self._keep_trying(each)) for each in new}
                            self._tell()
            except TimeoutError:
                pass
            for task in waiting:
                task.cancel()
        if not answered:
            raise self._failure(in_time=not waiting)
        return self._found

    def _met(self) -> bool:
        """Whether another node has called meanwhile; or this one is itself a first contact, which newcomers look for,
        and has waited long enough for the others."""
        own = self._core.peer_id in self._found.values()
        waited = loop_time() - self._began
        return len(self._core.contacts.table) > 0 or (own and waited >= ALONE)

    def _new(self, addresses: Iterable[str]) -> list[str]:
        """Those that are to be tried from now on. Raises AddressError."""
        new = [each for each in dict.fromkeys(addresses) if each not in self._found]
        self._found |= {address: parse_address(address).peer_id for address in new}
        return [each for each in new if self._found[each] != self._core.peer_id]

    async def _keep_trying(self, address: str) -> bool:
        """Whether it answered. Returns False only where every further try would end in the same way."""
        core, pause = self._core, FIRST_PAUSE
        while True:
            try:
                peer = self._found[address] = await core.endpoint.connect(address, timeout=CALL_TIMEOUT)
                await core.ping(peer)
                return True
            except OwnAddressError as error:
                self._failures[address] = error
                self._found[address] = core.peer_id
                return all(peer == core.peer_id for peer in self._found.values())  # the only first contact there is
            except NotAMember as error:
                self._failures[address] = error
                return False
            except SwarmError as error:
                # A search without an end goes on after WrongPeerError: the right peer may come back to that address.
                if core.endpoint.gave_way or (isinstance(error, WrongPeerError) and not self._patient):
                    self._failures[address] = error
                    return False
                self._note(address, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._longest_pause())

    def _longest_pause(self) -> float:
        if not self._patient:
            return LONGEST_PAUSE
        waited = loop_time() - self._began
        return min(max(LONGEST_PAUSE, PATIENT_SHARE * waited), CALMEST_PAUSE)

    def _note(self, address: str, error: SwarmError) -> None:
        """Reports a peer at once when each of its addresses has failed once, since the wait may be long. A search
        without an end reports all of them together instead (`_tell`)."""
        if not self._patient and address not in self._failures and self._last_to_fail(address):
            left = round(self._began + self._timeout - loop_time(), 1)
            text = f"{address} does not answer yet: {_why(address, error)}; trying again for {left:g} s"
            self._core.endpoint.events.emit(Noticed("warning", text))  # a script shows these without being told to
        self._failures[address] = error

    def _last_to_fail(self, address: str) -> bool:
        """Whether all other addresses of the same peer have failed: links name all addresses of a peer, and some lead
        nowhere from here."""
        named = parse_address(address).peer_id
        same = [each for each in self._found if each != address and parse_address(each).peer_id == named]
        return named is None or all(each in self._failures for each in same)

    def _tell(self) -> None:
        now = loop_time()
        if now < self._tell_at:
            return
        self._tell_at = now + min(max(TELL, now - self._began), QUIET)
        since = time.strftime("%H:%M:%S", time.localtime(self._since))
        tried = [f"{place_of(each)} ({_why(each, error)})" for each, error in self._failures.items()]
        more = f" and {len(tried) - MOST_TOLD} more" if len(tried) > MOST_TOLD else ""
        self._say(  # what helps comes first: a long list is cut at its end
            f"nobody has answered since {since}; this peer tries again at least every {CALMEST_PAUSE:g} s, until "
            "Ctrl-C. Start one of these again, or name another peer (--peer, or a new link): "
            f"{', '.join(tried[:MOST_TOLD])}{more}"
        )

    def _say(self, text: str) -> None:
        self._core.endpoint.events.emit(Noticed("info", text))

    def _failure(self, *, in_time: bool) -> BootstrapError:
        others = [address for address, peer in self._found.items() if peer != self._core.peer_id]
        attempts = {address: self._failures.get(address, CallTimeout("no answer yet")) for address in others}
        lines = [str(error) or type(error).__name__ for error in attempts.values()]
        named = [line if each in line else f"{each}: {line}" for each, line in zip(attempts, lines, strict=True)]
        within = "" if in_time else f" within {self._timeout:g} s"
        return BootstrapError(f"no first contact answered{within}: {'; '.join(named)}", attempts)


def _why(address: str, error: SwarmError) -> str:
    return str(error).removeprefix(f"{address}: ") or type(error).__name__
