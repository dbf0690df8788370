"""In which bucket a peer looks for its next group: the grid of Moshpit SGD (arXiv 2103.03239, section 3.2)."""

from __future__ import annotations

import hashlib
import math

from swarmcli.averaging.group import Group
from swarmcli.network.identity import PeerID


def group_key(prefix: str, bits: str) -> str:
    """The key under which peers of one bucket declare themselves."""
    return f"{prefix}.0b{bits}"


def next_bits(bits: str, group: Group, me: PeerID, target_size: int) -> str:
    """The bucket after a round in `group`. Members of one group go to different buckets, as far as there are enough.

    A peer's place in a shuffle that the group id fixes is written in binary behind the bits, and as many fall off at
    the front. So with all groups full, everyone holds the mean of all after 1 + len(bits) / log2(target_size) rounds.
    """
    if not bits:
        return bits
    order = sorted(group.members, key=lambda member: hashlib.sha256(group.group_id + member.peer_id).digest())
    place = next(index for index, member in enumerate(order) if member.peer_id == me)
    width = max(1, math.ceil(math.log2(target_size)))
    return (bits + f"{place % 2**width:0{width}b}")[-len(bits) :]
