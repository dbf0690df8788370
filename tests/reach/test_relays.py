"""A client and its relays: which it takes, and what it does when they go."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from swarmcli.network import Endpoint, Identity, PeerID
from swarmcli.reach.relay_messages import (
    OFFER,
    RESERVE,
    AskForOffer,
    RelayOffer,
    RelayRecord,
    Reserve,
    Reserved,
    read_record,
)
from swarmcli.reach.relaying import Relay, RelayBudgets
from swarmcli.reach.relays import Relays
from swarmcli.testing import MemoryNetwork
from tests.network.worlds import reaches
from tests.reach.relay_worlds import Client, Scene, scene
from tests.simulation import simulated


class Board:
    """In place of the hash table."""

    def __init__(self) -> None:
        self.records: dict[PeerID, RelayRecord] = {}
        self.reads = 0

    async def find(self) -> Mapping[PeerID, RelayRecord]:
        self.reads += 1
        await asyncio.sleep(0.1)
        return dict(self.records)


def by_number(source: PeerID, target: PeerID) -> float:
    """Relays with a larger number are farther away."""
    return 0.01 * (1 + max(_NUMBERS.get(source, 0), _NUMBERS.get(target, 0)))


_NUMBERS = {Identity.from_seed(number).peer_id: number for number in range(10)}


async def relays_of(peers: Scene, board: Board, *seeds: int) -> list[tuple[Endpoint, Relay]]:
    """Relays that advertise themselves."""
    made = [await peers.relay(seed) for seed in seeds]
    board.records |= {endpoint.peer_id: RelayRecord(endpoint.addresses) for endpoint, _ in made}
    return made


async def keeper(peers: Scene, client: Client, board: Board) -> Relays:
    """Searches for relays until the scene ends."""
    relays = Relays(client.endpoint, client.transport, find=board.find)
    peers.at_end(relays.close)
    await relays.start()
    return relays


async def until(relays: Relays, *expected: Endpoint, within: float) -> None:
    """Waits until just these are held, the nearest first."""
    async with asyncio.timeout(within):
        while [held.peer for held in relays.held] != [endpoint.peer_id for endpoint in expected]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def until_two(relays: Relays, *, within: float) -> None:
    async with asyncio.timeout(within):
        while len(relays.held) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@simulated
async def test_the_nearest_is_taken_and_announced_and_one_by_lot() -> None:
    seconds: set[PeerID] = set()
    async with scene(latency=by_number) as peers:
        board = Board()
        made = [endpoint for endpoint, _ in await relays_of(peers, board, 4, 2, 3, 1)]
        for seed in range(8):
            client = await peers.client(seed)
            relays = await keeper(peers, client, board)
            await until_two(relays, within=3)
            first, second = [endpoint for held in relays.held for endpoint in made if endpoint.peer_id == held.peer]
            assert first is made[3] and second is not first
            seconds.add(second.peer_id)
            assert client.endpoint.addresses == (client.address(first), client.address(second))
            assert client.transport.relays == {first.peer_id, second.peer_id}
            await relays.close()
    assert len(seconds) > 1, "whoever is near to all is not both relays of all"


@simulated
async def test_a_contact_that_relays_needs_no_record() -> None:
    async with scene() as peers:
        board = Board()
        contact, _ = await peers.relay(0)
        bystander = await peers.listener(1)  # knows nothing of relaying
        client = await peers.client(0)
        for endpoint in (contact, bystander):
            await client.endpoint.connect(endpoint.addresses[0], timeout=5)
        relays = await keeper(peers, client, board)
        await until(relays, contact, within=1)
        await asyncio.sleep(600)
        assert board.reads < 30, "one relay is missing, which is no reason to ask all the time"
        later, _ = await peers.relay(2)
        board.records[later.peer_id] = RelayRecord(later.addresses)
        await asyncio.sleep(70)
        assert len(relays.held) == 2


@simulated
async def test_reservations_are_renewed_for_hours() -> None:
    async with scene() as peers:
        board = Board()
        [(_, relay)] = await relays_of(peers, board, 0)
        client = await peers.client(0)
        await keeper(peers, client, board)
        for _ in range(8):
            await asyncio.sleep(450)
            assert relay.statistics().reservations == 1


@simulated
async def test_a_relay_that_is_killed_is_replaced_within_seconds() -> None:
    async with scene(latency=by_number) as peers:
        board = Board()
        made = [endpoint for endpoint, _ in await relays_of(peers, board, 1, 2, 3)]
        a, b = await peers.client(0), await peers.client(1)
        keepers = [await keeper(peers, client, board) for client in (a, b)]
        for relays in keepers:
            await until_two(relays, within=3)
        await a.meet(b)
        assert await reaches(a.endpoint, b.endpoint)
        peers.network.kill(made[0].peer_id)
        for relays in keepers:
            await until(relays, made[1], made[2], within=5)
        assert await reaches(a.endpoint, b.endpoint)
        peers.network.kill(made[1].peer_id)
        await asyncio.sleep(3)
        # Told over the connection that stood: where the other one can be reached now.
        assert await reaches(b.endpoint, a.endpoint)
        for relays in keepers:
            await until(relays, made[2], within=5)


@simulated
async def test_a_client_that_becomes_dialable_gives_its_reservations_back() -> None:
    async with scene() as peers:
        board = Board()
        made = await relays_of(peers, board, 0, 1)
        client = await peers.client(0)
        relays = await keeper(peers, client, board)
        await asyncio.sleep(2)
        assert [relay.statistics().reservations for _, relay in made] == [1, 1]
        await relays.close()
        assert [relay.statistics().reservations for _, relay in made] == [0, 0]
        assert client.endpoint.addresses == () and not client.transport.relays
        await relays.start()  # it has moved behind a router again
        await asyncio.sleep(2)
        assert len(client.endpoint.addresses) == 2


@simulated
async def test_a_relay_without_room_and_a_dead_one_are_passed_over() -> None:
    async with scene(latency=by_number) as peers:
        board = Board()
        full, _ = await peers.relay(0, RelayBudgets(reservations=1))
        await (await peers.client(9)).reserve(full)
        board.records[full.peer_id] = RelayRecord(full.addresses)
        board.records[Identity.from_seed(99).peer_id] = RelayRecord(("memory://nobody",))
        [(good, _)] = await relays_of(peers, board, 5)
        client = await peers.client(0)
        relays = await keeper(peers, client, board)
        await until(relays, good, within=5)


@simulated
async def test_the_second_relay_is_rather_in_another_network() -> None:
    network = MemoryNetwork(seed=1, latency=by_number)
    async with scene(network) as peers:
        board = Board()
        made = []
        for seed, host in ((1, "192.0.2.1"), (2, "192.0.2.2"), (4, "198.51.100.1")):
            made.append((await peers.relay(seed, host=host))[0])
            board.records[made[-1].peer_id] = RelayRecord(made[-1].addresses)
        client = await peers.client(0)
        relays = await keeper(peers, client, board)
        await until(relays, made[0], made[2], within=3)


@simulated
async def test_many_relays_of_two_networks_are_seldom_both_relays_of_a_client() -> None:
    """Sixteen that refuse to carry beside four honest ones; all advertise themselves, and half of them are contacts."""
    async with scene() as peers:
        board = Board()
        hosts = [f"198.51.{100 + number % 2}.{number + 1}" for number in range(16)]
        liars = [await peers.listener(100 + number, host=host, listening=True) for number, host in enumerate(hosts)]
        for liar in liars:
            await Relay(liar).start()
        honest = [(await peers.relay(number, host=f"203.0.{number}.1"))[0] for number in range(4)]
        board.records = {each.peer_id: RelayRecord(each.addresses) for each in (*liars, *honest)}
        cut_off = 0
        for seed in range(8):
            client = await peers.client(seed)
            for contact in (*liars[:8], *honest[:2]):
                await client.endpoint.connect(contact.addresses[0], timeout=5)
            relays = await keeper(peers, client, board)
            await until_two(relays, within=5)
            cut_off += {held.peer for held in relays.held}.isdisjoint(each.peer_id for each in honest)
            await relays.close()
        assert cut_off <= 2, "of eight"


@simulated
async def test_a_reservation_that_ends_at_once_is_none() -> None:
    async with scene() as peers:
        asked = 0

        async def offer(peer: PeerID, request: AskForOffer) -> RelayOffer:
            return RelayOffer(True)

        async def reserve(peer: PeerID, request: Reserve) -> Reserved:
            nonlocal asked
            asked += 1
            return Reserved(1e-12)

        hasty = await peers.listener(1)
        hasty.serve(OFFER, AskForOffer, offer)
        hasty.serve(RESERVE, Reserve, reserve)
        client = await peers.client(0)
        await client.endpoint.connect(hasty.addresses[0], timeout=5)
        relays = await keeper(peers, client, Board())
        await asyncio.sleep(600)
        assert not relays.held and not client.transport.relays and not client.endpoint.addresses
        assert 1 <= asked <= 11, "asked as seldom as one that refuses"


@simulated
async def test_relays_advertise_themselves_while_they_can_be_dialed() -> None:
    async with scene() as peers:
        board = Board()

        async def publish(record: RelayRecord, seconds: float) -> bool:
            board.records[endpoint.peer_id] = record
            return True

        endpoint, _ = await peers.relay(0, publish=publish)
        await asyncio.sleep(1)
        assert board.records[endpoint.peer_id] == RelayRecord(endpoint.addresses)
        board.records.clear()
        direct = endpoint.addresses
        endpoint.announce(direct=())
        await asyncio.sleep(1000)
        assert not board.records
        endpoint.announce(direct=direct)
        await asyncio.sleep(10)
        assert endpoint.peer_id in board.records


def test_records_of_strangers_are_read_strictly() -> None:
    good = RelayRecord(("tcp://192.0.2.1:1",))
    assert read_record(good.value()) == good
    for bad in (
        None,
        3,
        {},
        {"addresses": []},
        {"addresses": ["x"] * 100},
        {"addresses": "x"},
    ):
        assert read_record(bad) is None
