"""What strangers write reaches terminals, logs and the dashboard without what could steer them."""

import time

import msgspec
import pytest

from swarmcli.errors import CallRefused, RemoteError
from swarmcli.events import Event, Events, PeerDisconnected
from swarmcli.network import Identity
from swarmcli.network.wire.codec import decode
from swarmcli.network.wire.messages import HandlerFailed, raised
from swarmcli.words import (
    format_duration,
    format_moment,
    format_rate,
    format_size,
    harmless,
    listed,
    plural,
    printable,
    roughly,
    some,
)

EVIL = "\x1b[2J\x07safe\u202eevil\u2066\u200b\x9b31m"
TAME = "[2Jsafeevil31m"


def test_lines_stay_in_harmless_words_and_become_one_in_printable_ones() -> None:
    assert harmless(EVIL + "\n\tnext ü 語") == TAME + "\n\tnext ü 語"
    assert printable("a\nb" + EVIL) == "a b" + TAME
    assert printable("x" * 500, 10) == "x" * 9 + "…"


def test_an_error_of_the_system_is_told_in_its_words_without_its_number() -> None:
    told = "the connection broke: [Errno 104] Connection reset by peer"
    assert harmless(told) == printable(told) == "the connection broke: Connection reset by peer"
    assert printable(f"{told} ü") == "the connection broke: Connection reset by peer ü"


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


def test_sizes_rates_and_durations_are_as_exact_as_they_are_long() -> None:
    sizes = [0, 12, 999.4, 999.5, 1.77e6, 463e3, 99.96e6, 3.2e12, 5e15, -2e6]
    assert [format_size(each) for each in sizes] == [
        "0 B", "12 B", "999 B", "1.0 kB", "1.8 MB", "463 kB", "100 MB", "3.2 TB", "5000 TB", "-2.0 MB"
    ]  # fmt: skip
    assert [format_rate(each) for each in (7e4, 3.2e5, 1.25e7, 1.25e8)] == [
        "560 kbit/s", "2.6 Mbit/s", "100 Mbit/s", "1.0 Gbit/s"
    ]  # fmt: skip
    seconds = [0.0, 0.08, 9.94, 9.96, 99.4, 100, 5969, 7200, 170_999, 200_000, 900_000]
    assert [format_duration(each) for each in seconds] == [
        "0 ms", "80 ms", "9.9 s", "10 s", "99 s", "2 min", "99 min", "2.0 h", "47 h", "2.3 days", "10 days"
    ]  # fmt: skip
    assert [roughly(each) for each in (0.0, 3.4, 200.0, 200_000)] == ["1 s", "3 s", "3 min", "2.3 days"]
    soon, far = time.time() + 60, 4e17
    assert format_moment(soon)[-5:] == time.strftime("%H:%M", time.localtime(soon)) and format_moment(far) > "9892"
    assert [plural(1, "peer"), plural(1200, "peer"), plural(2, "auxiliary", "auxiliaries")] == [
        "1 peer", "1,200 peers", "2 auxiliaries"
    ]  # fmt: skip
