"""What the caller of a handler that failed is told, and what it raises there."""

from __future__ import annotations

import logging

from swarmcli.errors import CallError, CallRefused, RemoteError, SwarmError, UnknownMethod
from swarmcli.network.identity import PeerID
from swarmcli.network.wire.messages import MAX_TEXT, Failed

logger = logging.getLogger(__name__)


def failed(error: Exception, method: str, peer: PeerID) -> Failed:
    """What goes back to the peer whose request failed here. Logs what is not a refusal."""
    if isinstance(error, CallRefused):
        return Failed("refused", error.code[:MAX_TEXT], str(error)[:MAX_TEXT])
    if isinstance(error, SwarmError):  # an ordinary misfortune, such as a third peer that is gone
        logger.info("the handler of %s failed on a request from %s: %s", method, peer.short, error)
    else:
        logger.error("the handler of %s failed on a request from %s", method, peer.short, exc_info=error)
    return Failed("error", "", f"{type(error).__name__}: {error}"[:MAX_TEXT])


def raised(failed: Failed, peer: PeerID) -> CallError:
    """The exception that the caller sees."""
    if failed.kind == "refused":
        return CallRefused(failed.code, failed.text)
    if failed.kind == "unknown method":
        return UnknownMethod(f"{peer.short} serves no method {failed.text!r}")
    return RemoteError(f"{peer.short}: {failed.text or failed.kind}")
