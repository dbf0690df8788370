"""Every exception of the project, as one tree.

SwarmError
├── NetworkError
│   ├── AddressError              an address that cannot be read (also a ValueError)
│   ├── IdentityError             the key file cannot be read, is another user's, or is in use
│   ├── ListenError               the port is taken or may not be opened
│   ├── ConnectError              a connection could not be made; `.step` says how far it came
│   │   └── HandshakeError        the other end is no swarm peer, or speaks another version
│   │       ├── WrongPeerError    the other end proved to be somebody else
│   │       ├── NotAMember        the run is closed, and one end has shown no invitation that holds
│   │       └── OwnAddressError   the address leads back to this very peer
│   ├── ConnectionLost            a connection that stood has ended; `.reason` says why
│   │   └── ProtocolViolation     … because the other end broke a bound or sent what cannot be read
│   ├── EndOfStream               the other end of a stream has finished, or reads no more
│   └── CallError                 a call or stream did not come to its end
│       ├── CallTimeout           the deadline passed
│       ├── PeerUnreachable       neither end of the pair can dial the other, or no address is known
│       ├── UnknownMethod         the other end serves no such method
│       ├── RemoteError           the handler over there failed; carries its words
│       └── CallRefused           the handler over there said no; carries `.code` and its words
├── DHTError
│   ├── ValidationError           a record was refused by a validator or a bound
│   └── BootstrapError            no first contact answered; `.attempts` says what failed with each
├── CompressionError              a tensor message that cannot be decoded within its bounds
├── AveragingError
│   ├── MatchmakingError          no group came together in time; `.reason` says why
│   │   └── RoundMissed           … because the only round of its tag has begun without this peer
│   ├── NoReducerError            nobody in the group can reduce for everyone
│   ├── InputRefused              what a member sent cannot be averaged; it is left out, the round goes on
│   ├── RoundFailed               the group's round was given up; tensors are untouched
│   ├── RoundUndecided            this peer was cut off and cannot learn the outcome; inputs are kept
│   └── StateDownloadError        no donor gave a complete state; `.attempts` says what failed with each
│       └── NoDonorReachable      others train, but nobody who holds their state can be reached
├── OptimizerError                the collaborative optimizer was used in a way that it refuses
│   └── GradScalerError           a GradScaler was called in an order that would step with wrong gradients
├── ShardingError                a sharded optimizer lacks what it was asked for, or its state could not be sent
├── SiteError                     the processes of a site have lost each other, or one of them has failed
├── FingerprintError              the run refused this peer: its recipe differs; `.keys` says where
├── MembershipError               a closed run, and this peer has no invitation to it, or none that holds
├── ControlError                  a running peer of this user cannot be asked, or refuses what it is asked
├── UsageError                   a command lacks a word that it needs; the message says which
├── RecipeError                   a recipe that cannot be used; the message names file, line and fix
│   └── HubError                  the Hugging Face Hub does not give the model to this user
│       ├── UnknownCommit         the model has no such commit
│       └── HubUnreachable        the Hub cannot be reached from this computer
├── DataError                     training data that is missing or cannot be read
├── TrainingError                 training cannot go on, for example because losses are not finite
├── CheckpointError               a checkpoint that is damaged, of another run, or of another model
└── JournalError                  a journal that cannot be opened or read

Wrong arguments in code are plain ValueError and TypeError. Errors of libraries are translated where they enter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

ConnectStep = Literal["name resolution", "connect", "handshake", "call"]


class SwarmError(Exception):
    """Base of everything that this project raises on purpose."""


class NetworkError(SwarmError):
    """Something between two peers went wrong."""


class AddressError(NetworkError, ValueError):
    """An address that cannot be read; the message shows it and the form that was expected."""


class IdentityError(NetworkError):
    """The identity file cannot be used; the message names the file and the fix."""


class ListenError(NetworkError):
    """This peer cannot listen where it was told to; the message names host, port and the fix."""


class ConnectError(NetworkError):
    """No connection came about. `step` says how far the attempt got, `address` what was dialed."""

    def __init__(self, message: str, *, step: ConnectStep = "connect", address: str = "") -> None:
        super().__init__(message)
        self.step: ConnectStep = step
        self.address = address


class HandshakeError(ConnectError):
    """The other end is no swarm peer, or one that this version cannot talk to."""

    def __init__(self, message: str, *, address: str = "") -> None:
        super().__init__(message, step="handshake", address=address)


class WrongPeerError(HandshakeError):
    """The other end holds another key than the one that was asked for."""


class NotAMember(HandshakeError):
    """The run is closed, and one of the two ends has shown no invitation that holds. The other end may read the
    message."""


class OwnAddressError(HandshakeError):
    """The address leads back to this very peer."""


class ConnectionLost(NetworkError):
    """A connection that stood has ended; what was under way on it has failed."""

    def __init__(self, reason: str = "connection lost") -> None:
        super().__init__(reason)
        self.reason = reason

    def fresh(self) -> ConnectionLost:
        """The same error for one more waiter: one instance raised by several would tie their tracebacks together."""
        return type(self)(self.reason)


class ProtocolViolation(ConnectionLost):
    """The connection was closed because the other end broke the protocol; `reason` names the rule."""


class EndOfStream(NetworkError):
    """The other end of a stream has sent its last message; for a sender: its handler has returned and reads no more."""


class CallError(NetworkError):
    """A call or stream did not come to its end."""


class CallTimeout(CallError):
    """No answer before the deadline."""


class PeerUnreachable(CallError):
    """No connection to this peer exists and none can be made."""


class UnknownMethod(CallError):
    """The other end serves no method of this name."""


class RemoteError(CallError):
    """The handler at the other end failed; the message is its words, cut to a bounded length."""


class CallRefused(CallError):
    """The handler at the other end said no. Handlers raise it; callers see the same code and words.

    `code` is a short word for programs (for example "full", "lineage"), the message is for people.
    """

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(message or code)
        self.code = code


class DHTError(SwarmError):
    """The distributed hash table could not do what was asked."""


class ValidationError(DHTError):
    """A record was refused by a validator or a bound; the message names which."""


class BootstrapError(DHTError):
    """No first contact answered. `attempts` maps each address to the error that it ended with."""

    def __init__(self, message: str, attempts: Mapping[str, Exception] | None = None) -> None:
        super().__init__(message)
        self.attempts = dict(attempts or {})


class CompressionError(SwarmError):
    """A tensor message that is malformed or larger than its bound."""


class AveragingError(SwarmError):
    """A round of averaging did not succeed."""


class MatchmakingError(AveragingError):
    """No group came together in time."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RoundMissed(MatchmakingError):
    """The round that this peer looked for has begun without it; those in it know, or will know, how it ended."""


class NoReducerError(AveragingError):
    """No member of the group can be reached by all who would send to it."""


class InputRefused(AveragingError):
    """A member's input cannot be averaged. The member is left out from there on; the round goes on without it."""


class RoundFailed(AveragingError):
    """The whole group gave the round up, or its members handed in too few samples; nobody's tensors changed."""

    def __init__(self, reason: str, suspects: Sequence[bytes] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.suspects = tuple(suspects)


class RoundUndecided(AveragingError):
    """This peer was cut off before it could learn the outcome; its inputs are kept."""


class StateDownloadError(AveragingError):
    """No donor gave a complete state. `attempts` maps each donor to what happened with it."""

    def __init__(self, message: str, attempts: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.attempts = dict(attempts or {})


class NoDonorReachable(StateDownloadError):
    """Others train this run, and this peer reaches nobody who holds their state: it would train another model."""


class OptimizerError(SwarmError):
    """The collaborative optimizer was used in a way that it refuses; the message says why."""


class GradScalerError(OptimizerError, RuntimeError):
    """A GradScaler was called in an order that would step with wrongly scaled gradients; a RuntimeError as in torch."""


class ShardingError(SwarmError, RuntimeError):
    """A sharded optimizer was asked for what it does not have, or cannot follow; a RuntimeError as in torch."""


class SiteError(SwarmError):
    """The processes of a site have lost each other, or one of them has failed: all of them end, and start anew."""


class FingerprintError(SwarmError):
    """The run refused this peer because their recipes differ. `keys` names the differing keys."""

    def __init__(self, message: str, keys: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


class MembershipError(SwarmError):
    """The run is closed, and this peer has no invitation that holds; the message says whom to ask."""


class ControlError(SwarmError):
    """A running peer of this user could not be asked, or refused what it was asked; the message says what helps."""


class UsageError(SwarmError):
    """A command that lacks a word, or whose words do not fit together; the message says which."""


class RecipeError(SwarmError):
    """A recipe that cannot be used. The message reads `file:line: what is wrong; the fix`."""


class HubError(RecipeError):
    """The Hugging Face Hub has no such model, or gives it to others than this user."""


class UnknownCommit(HubError):
    """The model is there, and has no such commit."""


class HubUnreachable(HubError):
    """The Hub cannot be reached from this computer, and its cache here lacks what was wanted."""


class DataError(SwarmError):
    """Training data that is missing or cannot be read."""


class TrainingError(SwarmError):
    """Training cannot go on; the message says why and what may help."""


class CheckpointError(SwarmError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


class JournalError(SwarmError):
    """A journal that cannot be opened or read."""
