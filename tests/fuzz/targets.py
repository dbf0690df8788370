"""What reads bytes of strangers, or files that may be damaged: each with inputs that it takes, and the errors that it
may raise. Whatever else comes out of one is a fault."""

from __future__ import annotations

import importlib
import json
import pkgutil
import ssl
import tempfile
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pydantic
import torch

import swarmcli
from swarmcli.averaging.group import Group, Member
from swarmcli.checkpoints import layout as checkpoint
from swarmcli.compression import CompressionBase, TensorMessage, codec_named, extract
from swarmcli.compression.base import TensorHeader
from swarmcli.dht.records import OwnedSubkey, Record, decode_subkey, decode_value, encode_subkey
from swarmcli.dht.schema import SchemaValidator
from swarmcli.errors import (
    AddressError,
    CheckpointError,
    CompressionError,
    ConnectionLost,
    HandshakeError,
    JournalError,
    ProtocolViolation,
    RecipeError,
    ValidationError,
)
from swarmcli.events import PeerDisconnected
from swarmcli.files.flat import flatten
from swarmcli.files.tensor_file import write_tensors
from swarmcli.journal.journal import Journal
from swarmcli.journal.reader import JournalReader
from swarmcli.journal.tables import RunRecord
from swarmcli.network import Identity, NetworkLimits, PeerID, wire
from swarmcli.network.addresses import parse_address, readable
from swarmcli.network.membership import Invitation, Pass
from swarmcli.network.prefix import prefix_of_address
from swarmcli.network.transports.base import Purpose
from swarmcli.network.transports.frames import FrameReader
from swarmcli.network.transports.tcp import handshake
from swarmcli.network.wire.codec import decode_header
from swarmcli.network.wire.messages import (
    BulkMessage,
    CallAnswer,
    CallFailure,
    ControlHello,
    ControlMessage,
    HandlerFailed,
    Open,
    Piece,
    Pong,
    Request,
)
from swarmcli.optim.epoch.note import MemberNote, read_told
from swarmcli.optim.peers.report import PeerKeys, PeerReport
from swarmcli.reach.mapping import nat_pmp
from swarmcli.reach.relay_messages import read_record
from swarmcli.recipe import digest_of
from swarmcli.recipe.link import Link, parse_link
from swarmcli.recipe.load import parse_recipe
from swarmcli.recipe.offered import offered, read_offered
from swarmcli.recipe.templates import SHIPPED
from swarmcli.recipe.ticket import Ticket
from swarmcli.state.snapshot import ChunkLayout, Manifest, read_manifest
from swarmcli.training import load_checkpoint
from tests.compression.codecs import PLAIN
from tests.recipe.recipes import small

PEER = Identity.from_seed(1)
OTHER = Identity.from_seed(2)
LIMITS = NetworkLimits(max_message=4096, max_payload=1 << 16)


@dataclass(frozen=True)
class Target:
    name: str
    read: Callable[[bytes], Any]
    seeds: list[bytes]
    errors: tuple[type[Exception], ...]
    slow: bool = False  # it opens files: fewer inputs


def _text(read: Callable[[str], Any]) -> Callable[[bytes], Any]:
    return lambda data: read(data.decode(errors="replace"))


class _Sink:
    def payload_buffer(self, header: bytes, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def frame_received(self, header: bytes, payload: memoryview) -> None:
        pass

    def connection_lost(self, error: Exception) -> None:
        pass


def read_frames(data: bytes) -> None:
    reader, sink = FrameReader(LIMITS), _Sink()
    for start in range(0, len(data), 7):
        rest = data[start : start + 7]
        taken = min(len(rest), len(reader.rest))
        if taken:
            reader.rest[:taken] = rest[:taken]
            reader.filled(taken)
        reader.feed(memoryview(rest)[taken:])
        while reader.deliver_next(sink):
            pass


def _greet(greeting: Any, data: bytes) -> None:
    """Drives one side of a greeting with whatever the other end says."""
    held = bytearray(data)
    with suppress(StopIteration):
        next(greeting)
        while (message := handshake.take_message(held)) is not None:
            greeting.send(message)


def greet_as_listener(data: bytes) -> None:
    _greet(handshake.greet_dialer(PEER, "tcp://192.0.2.1:1"), data)


def greet_as_dialer(data: bytes) -> None:
    _greet(handshake.greet_listener(PEER, OTHER.peer_id, Purpose.CONTROL), data)


def _said(*messages: tuple[handshake.GreetingKind, bytes]) -> bytes:
    return b"".join(handshake.Message(kind, body).encode() for kind, body in messages)


def read_mapping(data: bytes) -> None:
    for read in (nat_pmp.read_address, lambda answer: nat_pmp.read_granted(answer, 4000)):
        with suppress(nat_pmp.GatewayError):
            read(data)


def _compressed(codec: CompressionBase) -> bytes:
    message = codec.compress(torch.linspace(-1, 1, 300))
    header = wire.encode(message.header)
    return len(header).to_bytes(2, "big") + header + b"".join(bytes(piece) for piece in message.payload)


def read_tensor(data: bytes) -> None:
    """A header of its own length, and the payload behind it."""
    end = 2 + int.from_bytes(data[:2], "big")
    try:
        header = wire.decode(TensorHeader, data[2:end])
    except msgspec.DecodeError:
        return
    message = TensorMessage(header, (data[end:],))
    with suppress(CompressionError):
        codec_named(header.codec)
    with suppress(CompressionError):
        extract(message)
    extract(message, torch.empty(300))


def _manifest() -> bytes:
    tensors = {"weight": torch.zeros(30, 7), "bias": torch.zeros(0), "step": torch.tensor(1)}
    layout = ChunkLayout.of(tensors)
    return wire.encode(
        Manifest(b"version", wire.encode({"epoch": 1}), layout.entries, layout.chunk_size, bytes(32 * layout.chunks))
    )


@cache
def _recipe() -> str:
    return (SHIPPED / "stdlib-lm.yaml").read_text()


def read_recipe(data: bytes) -> None:
    parse_recipe(data.decode(errors="replace"), name="recipe", directory=Path("/nowhere"))


CONTENTS = {"base_model": {"model_type": "gpt2", "n_layer": 1}, "tokenizer": {"vocab.json": "0" * 64}}


@cache
def _of_a_saved_model() -> tuple[bytes, Link]:
    """A recipe as a link hands it out, with a model in a directory."""
    data = json.dumps(json.loads(offered(small())) | {"base_model": "models/x"}).encode()
    return data, replace(_link(), fingerprint=digest_of(parse_recipe(data.decode()), CONTENTS))


def read_contents(data: bytes) -> None:
    recipe, link = _of_a_saved_model()
    read_offered(recipe, link, Path("/nowhere"), data.decode(errors="replace"))


def read_link_recipe(data: bytes) -> None:
    read_offered(data, _link(), Path("/nowhere"))


@cache
def _link() -> Link:
    recipe = small()
    return Link(PEER.peer_id, ("192.0.2.7:4000", "[2001:db8::1]:4000"), recipe.run_id, digest_of(recipe))


@cache
def _checkpoint_files() -> dict[str, bytes]:
    """A small checkpoint, its statements without their digest: whoever changes them can write another one."""
    with tempfile.TemporaryDirectory() as place:
        found = {}
        state = torch.optim.Adam([torch.zeros(3, requires_grad=True)]).state_dict() | {"step": torch.tensor(3)}
        tensors: dict[str, torch.Tensor] = {}
        structure = flatten(state, tensors)
        for name, kept in ((checkpoint.TRAINING, tensors), (checkpoint.MODEL, {"weight": torch.ones(2, 3)})):
            write_tensors(Path(place) / name, kept)
            found[name] = (Path(place) / name).read_bytes()
        digests = {name: checkpoint.file_digest(Path(place) / name) for name in found}
    manifest = {"format": checkpoint.FORMAT, "run_id": "run", "epoch": 3, "optimizer": structure, "sha256": digests}
    return found | {checkpoint.MANIFEST: json.dumps(manifest).encode()}


def read_checkpoint(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        for name, content in (_checkpoint_files() | {checkpoint.MANIFEST: data}).items():
            (Path(place) / name).write_bytes(content)
        load_checkpoint(Path(place))


def read_training_file(data: bytes) -> None:
    """A file of tensors whose digest belongs to it, which whoever has damaged it knows to compute."""
    with tempfile.TemporaryDirectory() as place:
        files = _checkpoint_files() | {checkpoint.TRAINING: data}
        for name, content in files.items():
            (Path(place) / name).write_bytes(content)
        manifest = json.loads(files[checkpoint.MANIFEST])
        manifest["sha256"][checkpoint.TRAINING] = checkpoint.file_digest(Path(place) / checkpoint.TRAINING)
        (Path(place) / checkpoint.MANIFEST).write_text(json.dumps(manifest))
        load_checkpoint(Path(place))


@cache
def _journal() -> bytes:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "journal.sqlite"
        run = RunRecord("run", "trainer", PEER.peer_id.text, "alice", "0.1.0")
        with Journal(path, run=run, clock=lambda: 1e9) as journal:
            journal.record(PeerDisconnected(PEER.peer_id.text, "gone"))
        return path.read_bytes()


def read_journal(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "journal.sqlite"
        path.write_bytes(data)
        with JournalReader(path) as reader:
            reader.runs()
            for read in (reader.epochs, reader.events, reader.peers, reader.rounds, reader.totals):
                read("run")  # type: ignore[operator]


def read_report(data: bytes) -> None:
    PeerReport.model_validate(wire.decode(Any, data))


def read_group(data: bytes) -> None:
    """A group as its members take it up."""
    group = wire.decode(Group, data)
    _ = group.group_id
    list(read_told(member.gathered for member in group.members))


def _group() -> bytes:
    told = wire.encode(MemberNote(several=True, apart=True))
    members = [Member(each.peer_id, gathered=told, search=bytes(16)) for each in (PEER, OTHER)]
    return wire.encode(Group(b"tag", bytes(16), tuple(members), (0.5, 0.5)))


def read_offered_values(data: bytes) -> None:
    """What a peer writes into the hash table, as those read it who look for relays, peers or revocations."""
    value = decode_value(data)
    read_record(value)
    PEERS.validate(Record("run_peers", OWNED, data, 1e9))


PEERS = SchemaValidator(PeerKeys, prefix="run")
OWNED = encode_subkey(OwnedSubkey(PEER.peer_id))


def every_struct() -> list[type[msgspec.Struct]]:
    """All typed messages of the project: what is decoded from the wire is one of them, or a union of them."""
    for module in pkgutil.walk_packages(swarmcli.__path__, "swarmcli."):
        if ".cli" not in module.name and "__main__" not in module.name:
            importlib.import_module(module.name)
    found: list[type[msgspec.Struct]] = []
    left = list(msgspec.Struct.__subclasses__())
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if kind.__module__.startswith("swarmcli."):
            found.append(kind)
    return sorted(found, key=lambda kind: (kind.__module__, kind.__qualname__))


@cache
def _example(kind: Any, depth: int = 0) -> Any:
    """A value of roughly this type: lengths and bounds as its annotations say, where they are simple."""
    origin, arguments = getattr(kind, "__origin__", None), get_args(kind)
    if hasattr(kind, "__metadata__"):
        meta = next((each for each in kind.__metadata__ if isinstance(each, msgspec.Meta)), msgspec.Meta())
        value = _example(kind.__origin__, depth)
        if isinstance(value, str | bytes) and meta.min_length:
            value = type(value)() + (value or (b"x" if isinstance(value, bytes) else "x")) * meta.min_length
            value = value[: meta.min_length]
        return value
    if isinstance(kind, type) and issubclass(kind, PeerID):
        return PEER.peer_id
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and depth < 6:
        built = {each.encode_name: _example(each.type, depth + 1) for each in msgspec.structs.fields(kind)}
        tag = kind.__struct_config__.tag
        field = kind.__struct_config__.tag_field
        return {field: tag, **built} if field else built
    if is_dataclass(kind) and depth < 6:
        return {name: _example(hint, depth + 1) for name, hint in get_type_hints(kind, include_extras=True).items()
                if name in {each.name for each in fields(kind)}}  # fmt: skip
    if origin is tuple:
        return [_example(each, depth + 1) for each in arguments if each is not Ellipsis]
    if origin in (list, frozenset, set):
        return [_example(arguments[0], depth + 1)]
    if origin is dict or getattr(origin, "__name__", "") == "Mapping":
        return {}
    if isinstance(kind, types.UnionType) or str(origin) == "typing.Union":
        return _example(arguments[0], depth + 1)
    if str(origin) == "typing.Literal":
        return arguments[0]
    simple: dict[Any, Any] = {int: 1, float: 0.5, str: "words", bytes: b"bytes", bool: True}
    return simple.get(kind)


def _struct_targets() -> list[Target]:
    targets = []
    for kind in every_struct():
        with suppress(TypeError):  # a generic one, or one that is only sent
            example = wire.encode(_example(kind))
            name = f"message {kind.__module__.removeprefix('swarmcli.')}.{kind.__name__}"
            targets.append(
                Target(name, lambda data, kind=kind: wire.decode(kind, data), [example], (msgspec.DecodeError,))
            )
    return targets


@cache
def targets() -> tuple[Target, ...]:
    """All of them."""
    signed = OTHER.sign("dial", bytes(32))
    return (
        Target("control frames", lambda data: decode_header(ControlMessage, data), [
            wire.encode(each) for each in (
                ControlHello(bytes(16), ("tcp://192.0.2.1:4000",)), Request(0, "double", {"n": 1}),
                CallAnswer(0, 1.0, 2.0, [1]), CallFailure(3, HandlerFailed("refused", "busy", "words")),
                Pong(7, 1.0, 2.0),
            )
        ], (ProtocolViolation,)),
        Target("bulk frames", lambda data: decode_header(BulkMessage, data),
               [wire.encode(Open("stream", {"a": 1})), wire.encode(Piece([1]))], (ProtocolViolation,)),
        Target("frames", read_frames,
               [b"\0\0\0\x05\0\0\0\x03helloabc" * 3, b"\xff\xff\xff\xff\0\0\0\x07goodbye"], (ConnectionLost,)),
        Target("greeting of a dialer", greet_as_listener, [
            _said((handshake.GreetingKind.HELLO, bytes([0]) + OTHER.peer_id), (handshake.GreetingKind.PROOF, signed)),
        ], (HandshakeError,)),
        Target("greeting of a listener", greet_as_dialer, [
            _said((handshake.GreetingKind.CHALLENGE, bytes(32)), (handshake.GreetingKind.WELCOME, b"tcp://192.0.2.1:4000")),
            _said((handshake.GreetingKind.REFUSAL, "nö".encode())),
        ], (HandshakeError,)),
        Target("certificate", handshake.certified_peer, [_certificate()], (HandshakeError,)),
        Target("address", _text(parse_address), [
            b"tcp://192.0.2.1:4000", b"tcp://[2001:db8::1%eth0]:1", b"memory://a:1",
            f"relay://{PEER.peer_id.text}/{OTHER.peer_id.text}".encode(),
        ], (AddressError,)),
        Target("addresses", _text(lambda text: (readable(text.split(","), PEER.peer_id), prefix_of_address(text))),
               [b"tcp://192.0.2.1:4000,tcp://[::ffff:1.2.3.4]:1,memory://x", b"tcp://[2002:102:304::]:1"], ()),
        Target("subkey", decode_subkey, [encode_subkey("a"), encode_subkey(7)], (ValidationError,)),
        Target("value", decode_value, [wire.encode({"a": [1, 2.5, "x", None]})], (ValidationError,)),
        Target("mapping packets", read_mapping, [
            bytes([0, 128, 0, 0, 0, 0, 0, 9, 192, 0, 2, 1]),
            bytes([0, 130, 0, 0, 0, 0, 0, 9]) + (4000).to_bytes(2, "big") * 2 + (60).to_bytes(4, "big"),
        ], ()),
        Target("link", _text(parse_link), [str(_link()).encode()], (AddressError,)),
        Target("ticket", _text(Ticket.parse), [b"AQ" + b"a" * 300], (AddressError,)),
        Target("invitation", Invitation.decode, [b"\x01" + bytes(144)], (ValueError,)),
        Target("pass", Pass.decode, [b"\x01" + bytes(300)], (ValueError,)),
        Target("recipe", read_recipe, [_recipe().encode()], (RecipeError,), slow=True),
        Target("config and hashes of a saved model", read_contents, [json.dumps(CONTENTS).encode()],
               (RecipeError,), slow=True),
        Target("recipe of a link", read_link_recipe, [offered(small()).encode()], (RecipeError,), slow=True),
        Target("checkpoint", read_checkpoint, [_checkpoint_files()[checkpoint.MANIFEST]], (CheckpointError,),
               slow=True),
        Target("file of tensors", read_training_file, [_checkpoint_files()[checkpoint.TRAINING]], (CheckpointError,),
               slow=True),
        Target("journal", read_journal, [_journal()], (JournalError,), slow=True),
        Target("report of a peer", read_report, [_report()], (msgspec.DecodeError, pydantic.ValidationError)),
        Target("values in the hash table", read_offered_values,
               [_report(), wire.encode({"addresses": ["tcp://192.0.2.1:1"], "load": 0.5})], (ValidationError,)),
        Target("group", read_group, [_group()], (msgspec.DecodeError,)),
        Target("tensor", read_tensor, [_compressed(codec) for codec in PLAIN], (CompressionError,)),
        Target("state manifest", lambda data: read_manifest(data, 1 << 30), [_manifest()], (ValueError,)),
        *_struct_targets(),
    )  # fmt: skip


def _report() -> bytes:
    who = {"terms": "t", "role": "trainer", "name": "alice", "device": "cpu", "phase": "training", "client_mode": False}
    far = {"epoch": 3, "lineage": "0" * 64, "samples_seen": 1, "samples": 1, "samples_per_second": 1.0, "loss": 1.0}
    said = {"addresses": ["tcp://192.0.2.1:1"], "last_outcome": "", "last_reason": "", "time": 1e9}
    values = {**who, **far, **said}
    return wire.encode(values)


def _certificate() -> bytes:
    return ssl.PEM_cert_to_DER_cert(handshake._certificate(PEER).decode())
