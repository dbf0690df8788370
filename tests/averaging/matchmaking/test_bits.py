"""Buckets of the Moshpit grid: group mates part, and strangers' averages meet."""

from __future__ import annotations

import random
import statistics

from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.matchmaking.bits import group_key, next_bits
from swarmcli.network.identity import PeerID


def peers(count: int) -> list[PeerID]:
    return [PeerID(number.to_bytes(32, "big")) for number in range(count)]


def group_of(members: list[PeerID], nonce: int = 0) -> Group:
    return Group.form(b"", [Member(peer) for peer in members], [1.0] * len(members), nonce.to_bytes(16, "big"))


def test_keys_tell_buckets_apart() -> None:
    assert group_key("run", "") == "run.0b" and group_key("run", "01") == "run.0b01"


def test_without_bits_there_is_one_bucket() -> None:
    members = peers(3)
    assert next_bits("", group_of(members), members[0], 16) == ""


def test_members_go_to_buckets_of_their_own() -> None:
    members = peers(4)
    group = group_of(members)
    after = [next_bits("1011", group, peer, 4) for peer in members]
    assert {bits[:2] for bits in after} == {"11"} and {bits[2:] for bits in after} == {"00", "01", "10", "11"}


def test_the_mean_spreads_as_fast_as_the_grid_has_dimensions() -> None:
    """64 peers in groups of 4, so 16 buckets of 4 bits: after three rounds everyone holds the mean of all."""
    rng = random.Random(0)
    everyone = peers(64)
    values = {peer: rng.random() for peer in everyone}
    bits = {peer: f"{number // 4:04b}" for number, peer in enumerate(everyone)}
    mean = statistics.fmean(values.values())
    for nonce in range(3):
        buckets: dict[str, list[PeerID]] = {}
        for peer in everyone:
            buckets.setdefault(bits[peer], []).append(peer)
        for members in buckets.values():
            assert len(members) == 4
            group, average = group_of(members, nonce), statistics.fmean(values[peer] for peer in members)
            for peer in members:
                values[peer], bits[peer] = average, next_bits(bits[peer], group, peer, 4)
    assert all(abs(value - mean) < 1e-12 for value in values.values())
