"""How a user changes a running peer, by command or page: see `coordinator_web.control.Controls`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from swarmcli.errors import ControlError
from swarmcli.events import ActivityStatus
from swarmcli.peer.activity import STAYS_ASKED, Activity, asked
from swarmcli.recipe.limit_store import LimitStore


class PeerControls:
    """The controls of one peer. Any thread may call them."""

    def __init__(
        self,
        activity: Activity,
        limits: LimitStore,
        ask_to_stop: Callable[[], object],
        *,
        apply: Callable[[], object] = bool,
        seat: Callable[[], str] = str,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        """`ask_to_stop` hears that the role ends because its user asked for it. `apply` makes changed limits hold at
        once; then `seat` says why this trainer's samples cannot count; "": they can."""
        self._activity = activity
        self._limits = limits
        self._ask_to_stop = ask_to_stop
        self._apply, self._seat = apply, seat
        self._end_process = end_process

    def activity(self) -> ActivityStatus:
        return self._activity.status()

    def pause(self, until: float | None, seconds: float | None = None) -> None:
        """Raises ControlError when the peer is about to leave."""
        if self._activity.status().state == "stopping":
            raise ControlError("it is stopping already")
        self._activity.hold(asked(until), seconds)

    def resume(self) -> None:
        """Ends the user's pause. Other reasons to pause (its battery, say) stay."""
        self._activity.release("asked")

    def stop(self, *, now: bool) -> None:
        self._activity.stop(0.0 if now else STAYS_ASKED)
        self._ask_to_stop()

    def end(self) -> None:
        """Ends the process as a third Ctrl-C does: with no goodbye, and nothing saved."""
        self._end_process(130)

    def limits(self) -> Mapping[str, Any]:
        return {"limits": self._limits.shown(), "seat": self._seat()}

    def change_limits(self, changes: Mapping[str, Any], *, keep: bool) -> None:
        """Raises RecipeError, which says what such a limit may be."""
        self._limits.change(changes, keep=keep)
        self._apply()
