"""Addresses that are proven, told or heard: which goes before which, and what becomes of those that do not answer."""

from __future__ import annotations

from swarmcli.network.address_book import AddressBook
from swarmcli.network.addresses import Scope, readable, scope_of
from swarmcli.network.identity import Identity

PEER, OTHER, RELAY = (Identity.from_seed(number).peer_id for number in range(3))
PROVEN, TOLD, HEARD = "tcp://203.0.113.1:1", "tcp://203.0.113.2:1", "tcp://203.0.113.3:1"
BY_RELAY = f"relay://{RELAY}/{PEER}"


class Clock:
    now = 0.0


def made(max_peers: int = 10) -> tuple[AddressBook, Clock]:
    clock = Clock()
    return AddressBook(max_peers, lambda: clock.now), clock


def many(count: int, net: int = 1) -> tuple[str, ...]:
    return tuple(f"tcp://198.51.{net}.{number}:1" for number in range(1, count + 1))


def test_what_is_proven_comes_before_what_the_peer_tells_and_that_before_hearsay_and_relays_last() -> None:
    book, _ = made()
    book.learn(PEER, [BY_RELAY, HEARD])
    book.told(PEER, [TOLD])
    book.answered(PEER, PROVEN)
    assert book.addresses_of(PEER) == (PROVEN, TOLD, HEARD, BY_RELAY)
    assert book.first_hand(PEER) == (PROVEN,) and book.own_word(PEER) == (PROVEN, TOLD)


def test_nothing_that_anybody_says_displaces_a_proven_address() -> None:
    book, _ = made()
    book.answered(PEER, PROVEN)
    for turn in range(10):
        book.told(PEER, many(20, turn))
        book.learn(PEER, many(20, 100 + turn))
    assert book.first_hand(PEER) == (PROVEN,) and book.addresses_of(PEER)[0] == PROVEN
    book.told(PEER, [])
    assert book.own_word(PEER) == (PROVEN,), "it says that it cannot be dialed, and can"


def test_hearsay_does_not_drive_out_older_hearsay_at_once_nor_who_was_met() -> None:
    book, _ = made(max_peers=3)
    book.learn(PEER, many(4))
    book.learn(PEER, many(20, 2))
    assert set(many(4)) <= set(book.addresses_of(PEER)) and len(book.addresses_of(PEER)) == 8
    book.told(OTHER, [TOLD])
    for number in range(100):
        book.learn(Identity.from_seed(100 + number).peer_id, [HEARD])
    assert book.addresses_of(OTHER) == (TOLD,) and book.addresses_of(PEER) == () and len(book) == 4


def test_hearsay_that_fails_is_dropped_and_not_taken_up_again_for_a_while() -> None:
    book, clock = made()
    book.learn(PEER, [HEARD])
    for pause in (2.0, 4.0, 8.0):
        book.failed(PEER, HEARD)
        book.learn(PEER, [HEARD])
        assert book.addresses_of(PEER) == ()
        clock.now += pause
        book.learn(PEER, [HEARD])
        assert book.addresses_of(PEER) == (HEARD,)


def test_what_a_peer_tells_rests_ever_longer_while_it_fails_and_answers_again_at_once() -> None:
    book, clock = made()
    book.told(PEER, [TOLD])
    tries = 0
    for _ in range(3600):
        clock.now += 1.0
        book.told(PEER, [TOLD])  # as it does in every report
        if TOLD in book.addresses_of(PEER):
            tries += 1
            book.failed(PEER, TOLD)
    assert tries < 15
    book.answered(PEER, TOLD)
    assert book.addresses_of(PEER) == (TOLD,) == book.first_hand(PEER)


def test_a_proven_address_outlives_an_outage_and_goes_after_ten_minutes_of_failures() -> None:
    book, clock = made()
    book.answered(PEER, PROVEN)
    book.told(PEER, [TOLD])
    for _ in range(10):
        book.failed(PEER, PROVEN)
    assert book.addresses_of(PEER) == (TOLD, PROVEN), "it may be we who are cut off; but others are tried first"
    clock.now = 601.0
    book.failed(PEER, PROVEN)
    assert book.addresses_of(PEER) == (TOLD,) and book.first_hand(PEER) == ()
    book.answered(PEER, PROVEN)
    book.failed(PEER, PROVEN, somebody_else=True)
    assert book.first_hand(PEER) == (), "another peer answers there now"


def test_scopes() -> None:
    inner = "10.1.2.3 172.31.0.1 192.168.255.1 169.254.169.254 100.64.0.1 fd12::1 fe80::1%eth0 fec0::1 ::ffff:10.0.0.1"
    nowhere = "64:ff9b::10.0.0.1 64:ff9b::8.8.8.8 64:ff9b:1::1 198.18.0.1 0.0.0.0 224.0.0.1 255.255.255.255 ff02::1"
    for scope, hosts in (
        (Scope.HOST, "127.8.8.8 ::1 ::ffff:127.0.0.1"),
        (Scope.LAN, inner),
        (None, nowhere + " localhost 010.0.0.1"),
        (Scope.INTERNET, "198.20.0.1 8.8.8.8 2606:4700::1 100.128.0.1"),
    ):
        assert {host: scope_of(host) for host in hosts.split()} == dict.fromkeys(hosts.split(), scope)


def test_of_what_strangers_write_only_addresses_are_left_that_may_be_tried() -> None:
    said = [
        "junk",
        "x" * 5000,
        "tcp://example.org:80",  # only this peer's user has names resolved
        "tcp://0.0.0.0:80",
        "tcp://[fe80::1%eth0]:80",
        f"tcp://203.0.113.9:80/{OTHER}",
        f"relay://{RELAY}/{OTHER}",
        f"relay://{PEER}/{PEER}",
        BY_RELAY,
        f"tcp://203.0.113.9:80/{PEER}",
        "tcp://203.0.113.9:80",
        "tcp://192.168.1.1:80",
        "tcp://127.0.0.1:22",
    ]
    everywhere = ("tcp://203.0.113.9:80", "tcp://192.168.1.1:80", "tcp://127.0.0.1:22", BY_RELAY)
    assert readable(said, PEER) == everywhere
    assert readable(said, PEER, Scope.LAN) == everywhere[:2] + everywhere[3:]
    assert readable(said, PEER, Scope.INTERNET) == everywhere[:1] + everywhere[3:]
    assert len(readable(many(100), PEER)) == 8
