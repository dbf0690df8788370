from __future__ import annotations

from collections.abc import Mapping

import pytest

from swarmcli.errors import FingerprintError
from swarmcli.events import Event, PeerRefused
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity
from swarmcli.peer.admission import Admission
from swarmcli.testing.memory_network import MemoryNetwork
from swarmcli.testing.virtual_time import run

MINE = {"protocol": "1", "sequence_len": "aa", "optimizer.learning_rate": "bb"}


async def meet(
    run_id: str, fingerprint: Mapping[str, str], reported: list[Event] | None = None, *, serve: bool = True
) -> int:
    """A newcomer asks a peer of the run "demo"; how many welcome it. What the peer reports is in `reported`."""
    network = MemoryNetwork()
    old = Endpoint(network.transport(Identity.from_seed(1)))
    new = Endpoint(network.transport(Identity.from_seed(2)))
    await old.start()
    await new.start()
    old.events.subscribe((reported if reported is not None else []).append)
    try:
        if serve:
            Admission(old, "demo", MINE)
        contact = await new.connect(old.addresses[0], timeout=5.0)
        return len(await Admission(new, run_id, fingerprint).ask([contact]))
    finally:
        await new.close()
        await old.close()


def test_equal_recipes_are_welcome_and_a_contact_that_serves_no_run_yet_is_passed_over() -> None:
    reported: list[Event] = []
    assert run(meet("demo", MINE, reported)) == 1 and not any(isinstance(each, PeerRefused) for each in reported)
    assert run(meet("demo", MINE, serve=False)) == 0


def test_the_differing_keys_are_named_at_both_ends_and_a_peer_of_another_run_is_told_so() -> None:
    reported: list[Event] = []
    with pytest.raises(FingerprintError, match="differs in seed, sequence_len") as refusal:
        run(meet("demo", {**MINE, "sequence_len": "other", "seed": "new"}, reported))
    assert refusal.value.keys == ("seed", "sequence_len")
    (refused,) = [event for event in reported if isinstance(event, PeerRefused)]
    assert refused.peer == Identity.from_seed(2).peer_id.text and "sequence_len" in refused.reason
    with pytest.raises(FingerprintError, match="takes part in another run: 'demo', not 'mine'"):
        run(meet("mine", MINE))
