"""What strangers write reaches terminals, logs and the dashboard without what could steer them."""

import msgspec
import pytest

from swarmcli.errors import CallRefused, RemoteError
from swarmcli.events import Event, Events, PeerDisconnected
from swarmcli.network import Identity
from swarmcli.network.wire.codec import decode
from swarmcli.network.wire.messages import HandlerFailed, raised
from swarmcli.words import amount, harmless, listed, printable, some

EVIL = "\x1b[2J\x07safe\u202eevil\u2066\u200b\x9b31m"
TAME = "[2Jsafeevil31m"


def test_lines_stay_in_harmless_words_and_become_one_in_printable_ones() -> None:
    assert harmless(EVIL + "\n\tnext ü 語") == TAME + "\n\tnext ü 語"
    assert printable("a\nb" + EVIL) == "a b" + TAME
    assert printable("x" * 500, 10) == "x" * 9 + "…"


def test_an_error_of_the_system_is_told_in_its_words_without_its_number() -> None:
    told = "the other end broke off: [Errno 104] Connection reset by peer"
    assert harmless(told) == printable(told) == "the other end broke off: Connection reset by peer"
    assert printable(f"{told} ü") == "the other end broke off: Connection reset by peer ü"


def test_events_carry_nothing_that_steers_whoever_shows_them() -> None:
    events, heard = Events(), list[Event]()
    events.subscribe(heard.append)
    plain = PeerDisconnected("peer", "as usual")
    events.emit(plain)
    events.emit(PeerDisconnected("peer", EVIL))
    assert heard[0] is plain and heard[1] == PeerDisconnected("peer", TAME)


@pytest.mark.parametrize("kind", ["refused", "error", "unknown method"])
def test_a_refusal_reaches_the_caller_in_plain_words(kind: str) -> None:
    error = raised(HandlerFailed(kind, EVIL, EVIL), Identity.from_seed(1).peer_id)  # type: ignore[arg-type]
    assert str(error).isprintable() and TAME in str(error)
    if isinstance(error, CallRefused):
        assert error.code == TAME
    else:
        assert kind != "error" or isinstance(error, RemoteError)


def test_an_error_that_quotes_a_message_is_plain() -> None:
    class Tagged(msgspec.Struct, tag="a"):
        pass

    class Other(msgspec.Struct, tag="b"):
        pass

    with pytest.raises(msgspec.DecodeError) as caught:
        decode(Tagged | Other, msgspec.msgpack.encode({"type": EVIL}))  # type: ignore[arg-type]
    assert str(caught.value).isprintable()


def test_names_in_a_row() -> None:
    names = ["Ada", "Bob", "Cem", "Dan", "Eve", "Fay"]
    assert [listed(names[:count]) for count in (0, 1, 2, 4)] == ["", "Ada", "Ada and Bob", "Ada, Bob, Cem and Dan"]
    assert listed(names) == some(names) == "Ada, Bob, Cem, Dan and 2 more"
    assert (some(names[:1]), some(names[:3]), some(names, 2)) == ("Ada", "Ada, Bob, Cem", "Ada, Bob and 4 more")


def test_an_amount_of_bytes_is_written_out() -> None:
    assert [amount(size, 2) for size in (12, 463e3, 1.77e6)] == ["12 B", "460 kB", "1.8 MB"]
    assert amount(463e3) == "463 kB"
