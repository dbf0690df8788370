"""The greeting as plain generators: the honest course, and every message that has no place in it."""

from __future__ import annotations

import pytest

from swarmcli.errors import OwnAddressError, WrongPeerError
from swarmcli.network.identity import Identity
from swarmcli.network.transports.base import Purpose
from swarmcli.network.transports.tcp.handshake import (
    PROTOCOL_VERSION,
    Greeting,
    GreetingKind,
    Message,
    Refused,
    check_listener,
    greet_dialer,
    greet_listener,
    take_message,
)

SEEN = "tcp://203.0.113.9:4001"
LISTENER, DIALER, MALLORY = (Identity.from_seed(number) for number in range(3))


def only(data: bytes) -> Message:
    received = bytearray(data)
    message = take_message(received)
    assert message is not None and not received
    return message


def begin(purpose: Purpose = Purpose.BULK) -> tuple[Greeting, Greeting, Message]:
    """Both scripts up to the listener's challenge."""
    dialer, listener = greet_listener(DIALER, LISTENER.peer_id, purpose), greet_dialer(LISTENER, SEEN)
    assert next(listener) == b""
    return dialer, listener, only(listener.send(only(next(dialer))))


def test_a_proof_holds_for_its_challenge_its_listener_and_its_purpose_only(monkeypatch: pytest.MonkeyPatch) -> None:
    dialer, _, challenge = begin()
    proof, another = only(dialer.send(challenge)), begin()[1]
    monkeypatch.setattr("os.urandom", lambda count: challenge.body)  # the very challenge, which a relay can pass on
    for other in (another, _greet_as(MALLORY), _greet_as(LISTENER, Purpose.CONTROL)):
        with pytest.raises(Refused) as refused:
            other.send(proof)
        assert refused.value.rule == "false proof"


def _greet_as(identity: Identity, purpose: Purpose = Purpose.BULK) -> Greeting:
    script = greet_dialer(identity, SEEN)
    next(script)
    script.send(Message(GreetingKind.HELLO, bytes([purpose]) + DIALER.peer_id))
    return script


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        (Message(GreetingKind.PROOF, bytes(64)), "malformed hello"),
        (Message(GreetingKind.HELLO, bytes(32)), "malformed hello"),
        (Message(99, b""), "malformed hello"),
        (Message(GreetingKind.HELLO, bytes(33), PROTOCOL_VERSION + 1), "another version"),
        (Message(GreetingKind.HELLO, b"\x03" + bytes(32)), "unknown purpose"),
    ],
)
def test_the_listener_refuses_anything_else_in_words(message: Message, rule: str) -> None:
    script = greet_dialer(LISTENER, SEEN)
    next(script)
    with pytest.raises(Refused) as refused:
        script.send(message)
    assert refused.value.rule == rule
    words = only(refused.value.last_words)
    assert words.kind == GreetingKind.REFUSAL and words.body.decode() == str(refused.value)


def test_messages_are_taken_whole_and_one_by_one() -> None:
    stream = Message(1, b"one").encode() + Message(2, b"two").encode()
    received = bytearray()
    taken = []
    for byte in stream:
        received.append(byte)
        if message := take_message(received):
            taken.append(message)
    assert taken == [Message(1, b"one"), Message(2, b"two")]


def test_a_listener_is_checked_against_the_wanted_peer_and_oneself() -> None:
    check_listener(LISTENER.peer_id, None, DIALER.peer_id)
    check_listener(LISTENER.peer_id, LISTENER.peer_id, DIALER.peer_id)
    with pytest.raises(WrongPeerError, match="ask for a new link"):
        check_listener(MALLORY.peer_id, LISTENER.peer_id, DIALER.peer_id)
    with pytest.raises(OwnAddressError):
        check_listener(DIALER.peer_id, None, DIALER.peer_id)
