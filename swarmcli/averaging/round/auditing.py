"""Audits in a round: senders sign, reducers keep the inputs, members check some of them before they vote.

    sender    SenderTerms(hash of a secret), parts, every eighth with a signature   ─▶ reducer, which keeps them
    reducer   averages, Farewell(signature over their digests and the hashes of their inputs)  ─▶ member
    member    InputsRequest(secret, the parts that secret and signature name)        ─▶ reducer, which gives the inputs
    member    computes these averages again. If one is false: Accusation with all that proves it ─▶ all other members,
              which compute it again as well

`audit/` has the signatures, draws and proofs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from swarmcli.averaging.audit.case import (
    Case,
    FalseAccusation,
    FalseAverage,
    Statement,
    Verdict,
    is_accusation,
    sign_accusation,
)
from swarmcli.averaging.audit.kept import KeptInputs
from swarmcli.averaging.audit.signed import (
    SIGNED_TOGETHER,
    Exchange,
    Input,
    SignedParts,
    chance_for,
    commitment,
    drawn,
    inputs_hash,
    part_hash,
)
from swarmcli.averaging.audit.verdict import Terms
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.consensus.messages import DIGEST_BYTES, MAX_PARTS, SignedAverages
from swarmcli.averaging.consensus.presence import GroupCalls
from swarmcli.averaging.round.buffers import Average, Inputs, Results
from swarmcli.averaging.round.messages import AccusationHeader, Exhibit, InputHeader, InputsRequest
from swarmcli.averaging.round.plan import Part, Plan
from swarmcli.averaging.trust import PeerTrust
from swarmcli.compression import NoCompression, TensorHeader, TensorMessage
from swarmcli.compression.base import dtype_name
from swarmcli.errors import CallRefused, InputRefused, NetworkError, ProtocolViolation
from swarmcli.memory import unwritten
from swarmcli.network import Stream
from swarmcli.network.loop_thread import loop_time
from swarmcli.tasks import OFFLOAD_FROM, forget, forgetful, on_executor, unless_silent


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Bounds on audits in a round. Times in seconds."""

    signed_bytes: int = 4 << 20  # of parts under one signature at most, which their sender encodes in advance
    to_give: float = 30.0  # for the inputs of one part
    to_ask: float = (
        5.0  # for an auditor that has all averages to ask for inputs: with a slow download long after others
    )
    to_hear: float = 20.0  # for a whole accusation at one member: a slower one hears of it too late
    silence: float = 5.0  # without a byte of the inputs that an auditor has asked for


class Audits:
    """One member's part in the audits of one try: as a sender, as a reducer and as an auditor."""

    def __init__(
        self,
        mates: GroupCalls,
        plan: Plan,
        prefix: str,
        senders: Sequence[int],
        mine: Inputs | None,
        trust: PeerTrust,
        options: AllreduceOptions,
        how: AuditOptions = AuditOptions(),
    ) -> None:
        """`senders`: indices of all members whose tensors may be in an average; they are the auditors. `mine`: None for
        a member that sends nothing. `trust` gets the proofs."""
        self.where = Exchange(prefix, mates.group.group_id)
        self.withheld: dict[int, str] = {}  # reducer → how it failed to give the inputs for which it signed
        self.liars: dict[int, str] = {}  # reducer → its lie in this try
        self._mates, self._plan, self._options, self._trust = mates, plan, options, trust
        self._how = how
        self._senders, self._inputs = frozenset(senders), mine
        self._commitments: dict[int, bytes] = {}  # of others
        self._secrets: dict[int, bytes] = {}  # by reducer, this member's own
        self._batches: dict[int, SignedParts] = {}  # by sender, the last that it has sent here
        self._kept = KeptInputs()
        largest = max((part.payload_bound for part in plan.parts), default=1)
        self.together = max(1, min(SIGNED_TOGETHER, how.signed_bytes // largest))  # parts under one signature
        self._own: SignedParts | None = None  # over own inputs of parts that are reduced here
        self.signed: SignedAverages | None = None  # by this reducer, once it has
        self._inputs_of: dict[int, tuple[Input, ...]] = {}  # by part, those that this reducer has signed for
        self._serving = 0  # members that are getting averages or inputs
        self._served = -math.inf  # loop time at which the last of them had all
        self._asked, self._accused = set[int](), set[int]()  # members that have asked for inputs here, or accused
        self._looking, self._settled = set[asyncio.Timeout](), False  # at reducers' inputs; no more, once settled

    @property
    def owes(self) -> bool:
        """Whether somebody may still get inputs: a member that gets the averages, or has just got them."""
        return self._serving > 0 or loop_time() < self._served + self._how.to_ask

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While a member gets averages or inputs. With a slow download it does when the round is long settled."""
        self._serving += 1
        try:
            yield
        finally:
            self._serving -= 1
            self._served = loop_time()

    def close(self) -> None:
        """Lets go of all inputs: the round is settled. This member can still hear accusations. Idempotent."""
        self._kept.close()
        self._inputs_of.clear()
        self._inputs, self.signed = None, None

    def leave(self) -> None:
        """This member's part in the try is over: own tensors may change."""
        self._inputs = None

    def settle(self) -> None:
        """Ends what this member looks at: the round is decided, and it holds all averages. Nobody is at fault."""
        self._settled = True
        for patience in self._looking:
            patience.reschedule(loop_time())

    # As a sender

    def commitment_for(self, reducer: int) -> bytes:
        """The hash, for a reducer, of the secret by which this member will draw among its parts."""
        return commitment(self._secret_for(reducer))

    def sign(self, weight: float, parts: Sequence[Part], messages: Sequence[TensorMessage]) -> SignedParts:
        """Signs at most eight parts, as this member sends them."""
        hashes = {part.index: part_hash(message) for part, message in zip(parts, messages, strict=True)}
        return SignedParts.of(self._mates.endpoint.identity, self.where, weight, hashes)

    # As a reducer

    def begin(self, member: int, committed: bytes | None) -> None:
        """A member's first message is here. Raises InputRefused for one without a commitment."""
        if committed is None:
            raise InputRefused("it takes no part in audits, as this run demands")
        self._commitments[member] = committed

    def memory(self, nbytes: int) -> memoryview | None:
        """Memory for a part that arrives; None: the caller reads it into any memory, and it goes to a file."""
        return self._kept.memory(nbytes)

    @forgetful
    async def keep(
        self,
        part: Part,
        sender: int,
        weight: float,
        signed: SignedParts | None,
        message: TensorMessage,
        memory: memoryview | None,
    ) -> None:
        """A part has arrived. Raises InputRefused unless its sender has signed it; then nothing is kept."""
        if signed is not None:
            if not signed.is_by(self._mates.peer(sender), self.where, weight):
                raise InputRefused(f"part {part.index} comes with a false signature")
            self._batches[sender] = signed
        batch = self._batches.get(sender)
        if batch is None or batch.hash_of(part.index) != part_hash(message):
            raise InputRefused(f"part {part.index} is not what its sender signed")
        # Files are written beside the loop.
        nbytes = OFFLOAD_FROM if memory is None else 0
        await on_executor(nbytes, self._kept.keep, part.index, Input(sender, weight, weight, batch), message, memory)

    def note_inputs(self, part: Part, counted: Mapping[int, float]) -> bytes:
        """The sum of a part has these members in it, with these weights. Returns the hash of the inputs, which this
        reducer signs. For one part at a time, in any thread."""
        if self._mates.me in counted:
            self._keep_own(part)
        given = (self._kept.input(part.index, sender) for sender in counted)
        inputs = tuple(replace(each, counts=counted[each.sender]) for each in given)
        self._inputs_of[part.index] = inputs
        return inputs_hash(inputs)

    @forgetful
    async def give(self, member: int, request: InputsRequest, stream: Stream) -> None:
        """Gives an auditor the inputs of the parts that it has drawn, once. Raises CallRefused for other requests."""
        signed, parts = self.signed, [part.index for part in self._plan.by_reducer.get(self._mates.me, ())]
        if signed is None:
            raise CallRefused("over", "nothing is signed here, or the round is settled")
        if member in self._asked or commitment(request.secret) != self._commitments.get(member):
            raise CallRefused("not drawn", "this member has committed itself to another secret, or has asked before")
        chance = self._chance(self._mates.me)
        if not set(request.parts) <= set(drawn(request.secret, signed.signature, parts, chance)):
            raise CallRefused("not drawn", "the secret does not name these parts")
        self._asked.add(member)
        with self.serving():
            for index in request.parts:
                inputs = self._inputs_of.get(index, ())
                for place, given in enumerate(inputs):
                    message = await self._message(index, given.sender)
                    await stream.send(InputHeader(given, message.header, len(inputs) - place), message.payload)

    def _keep_own(self, part: Part) -> None:
        """Keeps a copy of the own input: after the round the tensors change, and an auditor may still ask."""
        assert self._inputs is not None
        if self._own is None or self._own.hash_of(part.index) is None:
            parts = self._plan.by_reducer[self._mates.me]
            begin = parts.index(part) // self.together * self.together
            batch = parts[begin : begin + self.together]
            self._own = self.sign(self._inputs.weight, batch, [_plain(self._inputs, each) for each in batch])
        message, weight = _plain(self._inputs, part), self._inputs.weight
        memory = self._kept.memory(message.payload_size)
        if memory is not None:
            memory[:] = memoryview(message.payload[0]).cast("B")
            message = TensorMessage(message.header, (memory,))
        self._kept.keep(part.index, Input(self._mates.me, weight, weight, self._own), message, memory)

    async def _message(self, part: int, sender: int) -> TensorMessage:
        try:
            return await on_executor(OFFLOAD_FROM, self._kept.message, part, sender)
        except (OSError, KeyError) as error:
            raise CallRefused("lost", "the inputs could not be kept") from error

    # As an auditor

    @forgetful
    async def look_at(
        self, reducer: int, averages: Sequence[Average], signed: SignedAverages, results: Results
    ) -> Case | None:
        """A reducer has signed all its averages, which are here: computes some of them again. Returns the case of a
        false one. Notes a reducer that does not give the inputs."""
        numbers = tuple(average.part.index for average in averages)
        names = set(drawn(self._secret_for(reducer), signed.signature, numbers, self._chance(reducer)))
        chosen = [each for each in averages if each.part.index in names and each.senders]
        if not chosen or numbers[-1] >= MAX_PARTS:  # no request can name so many parts
            return None
        digests, inputs = b"".join(a.digest for a in averages), b"".join(a.inputs for a in averages)
        statement = Statement(numbers, digests, inputs, signed)
        try:
            async with asyncio.timeout(self._how.to_give * len(chosen)) as patience:
                self._looking.add(patience)
                try:
                    return await self._fetch(reducer, chosen, statement, results)
                finally:
                    self._looking.discard(patience)
        except TimeoutError as error:
            forget(error)
            if not self._settled:
                self.withheld[reducer] = "it fell silent instead of giving the inputs of what it signed"
        except NetworkError as error:
            forget(error)
            if not await self._is_settled(reducer, error):
                self.withheld[reducer] = f"it did not give the inputs of what it signed: {error}"
        return None

    async def _is_settled(self, reducer: int, error: NetworkError) -> bool:
        """Whether a reducer has let go of the inputs because the round is decided."""
        if not isinstance(error, CallRefused) or error.code != "over":
            return False
        answer = await self._mates.presence(reducer)
        return answer is not None and answer.decided is not None

    async def _fetch(
        self, reducer: int, chosen: Sequence[Average], statement: Statement, results: Results
    ) -> Case | None:
        mates, group_id = self._mates, self.where.group_id
        request = InputsRequest(group_id, self._secret_for(reducer), tuple(each.part.index for each in chosen))
        peer, method = mates.peer(reducer), mates.method("inputs")
        async with mates.endpoint.stream(peer, method, request, timeout=self._how.to_give) as stream:
            for average in chosen:
                inputs, messages = await self._receive_inputs(average.part, stream)
                # A copy: another try may write to its memory while it is still evidence.
                content = NoCompression().compress(results.part(average.part).clone())
                case = self._case(average.part, statement, average.senders, average.weights, content, inputs, messages)
                nbytes = average.part.descriptor.nbytes * len(inputs)
                if not await on_executor(nbytes, case.is_complete):
                    raise ProtocolViolation(f"the inputs of part {average.part.index} are not those that it signed")
                if await on_executor(self._options.aggregator.passes * nbytes, case.deserves_accusation):
                    return case
        return None

    async def _receive_inputs(self, part: Part, stream: Stream) -> tuple[list[Input], list[TensorMessage]]:
        """Raises NetworkError (ProtocolViolation for more than the plan has) and TimeoutError."""

        def into(header: InputHeader, size: int) -> memoryview:
            if size > max(part.payload_bound, part.descriptor.nbytes):
                raise ProtocolViolation(f"an input of part {part.index} has {size} bytes")
            return unwritten(size)

        inputs, messages, left = list[Input](), list[TensorMessage](), len(self._senders)
        while left:
            async with unless_silent(stream, self._how.silence):
                header, payload = await stream.receive(InputHeader, into)
            if header.left > left or (inputs and header.left != left):
                raise ProtocolViolation(f"more inputs of part {part.index} than there are members")
            inputs.append(header.given)
            messages.append(TensorMessage(header.tensor, (payload,) if payload.nbytes else ()))
            left = header.left - 1
        return inputs, messages

    # Accusations

    async def accuse(self, case: Case) -> None:
        """Shows all other members the proof that an average is false; returns when they have judged it, or cannot."""
        self._prove(FalseAverage(case))
        async with asyncio.TaskGroup() as tasks:
            for member in self._mates.others:
                if member != case.terms.reducer:
                    tasks.create_task(self._show(member, case))

    @forgetful
    async def _show(self, member: int, case: Case) -> None:
        mates, terms, statement = self._mates, case.terms, case.statement
        request = AccusationHeader(
            self.where.group_id,
            terms.reducer,
            terms.part,
            case.senders,
            case.weights,
            statement.signed,
            sign_accusation(mates.endpoint.identity, case),
        )
        peer, method, seconds = mates.peer(member), mates.method("accuse"), self._how.to_hear
        try:
            async with (
                asyncio.timeout(seconds),
                mates.endpoint.stream(peer, method, request, timeout=seconds) as stream,
            ):
                await stream.send(Exhibit(), (statement.digests, statement.inputs))
                await stream.send(Exhibit(), () if case.average is None else case.average.payload)
                for place, (given, message) in enumerate(zip(case.inputs, case.messages, strict=True)):
                    header = InputHeader(given, message.header, len(case.inputs) - place)
                    await stream.send(header, message.payload)
                await stream.finish()
                await stream.receive(Exhibit)  # nothing comes: the stream ends when the member has judged
        except (NetworkError, TimeoutError) as error:
            forget(error)

    @forgetful
    async def hear(self, accuser: int, header: AccusationHeader, stream: Stream) -> None:
        """Another member accuses a reducer: one of the two lies, and this member bans the liar if it can tell which.
        Raises CallRefused for an accusation of another try, or a second one of the member, and the stream's errors."""
        parts = {part.index: part for part in self._plan.by_reducer.get(header.reducer, ())}
        if header.part not in parts or header.reducer == self._mates.me or accuser in self._accused:
            raise CallRefused("accusation", "it is of no other reducer's part, or this member has accused before")
        self._accused.add(accuser)
        async with asyncio.timeout(self._how.to_hear):
            case = await self._receive_case(parts, header, stream)
        peer = self._mates.peer(accuser)
        if not is_accusation(peer, header.signature, case):
            raise CallRefused("accusation", "the accuser has not signed it")
        verdict = await on_executor(case.terms.descriptor.nbytes * len(case.inputs), case.verdict)
        match verdict:
            case Verdict.FALSE:
                self._prove(FalseAverage(case))
            case Verdict.TRUE:
                self._prove(FalseAccusation(peer, header.signature, case))

    def _prove(self, evidence: FalseAverage | FalseAccusation) -> None:
        """Bans by evidence, which was verified."""
        if isinstance(evidence, FalseAverage):
            self.liars[evidence.case.terms.reducer] = evidence.words()
        self._trust.prove(evidence)

    async def _receive_case(self, parts: dict[int, Part], header: AccusationHeader, stream: Stream) -> Case:
        part, table = parts[header.part], len(parts) * DIGEST_BYTES

        async def exhibit(most: int) -> memoryview:
            def into(_: Exhibit, size: int) -> memoryview:
                if size > most:
                    raise ProtocolViolation(f"an exhibit of {size} bytes")
                return unwritten(size)

            return (await stream.receive(Exhibit, into))[1]

        tables = bytes(await exhibit(2 * table))
        content = await exhibit(part.descriptor.nbytes)
        plain = TensorHeader("none", dtype_name(part.descriptor.dtype), part.descriptor.shape)
        average = TensorMessage(plain, (content,)) if header.senders else None
        inputs, messages = await self._receive_inputs(part, stream)
        statement = Statement(tuple(parts), tables[:table], tables[table:], header.averages)
        return self._case(part, statement, header.senders, header.weights, average, inputs, messages)

    # As either

    def _secret_for(self, reducer: int) -> bytes:
        """This member's secret for a reducer. No other can guess it, and it takes no random numbers: a run depends on
        its seed alone."""
        if reducer not in self._secrets:
            where, peer, identity = self.where, self._mates.peer(reducer), self._mates.endpoint.identity
            signature = identity.sign("audit", where.prefix.encode(), where.group_id, peer)
            self._secrets[reducer] = commitment(signature)
        return self._secrets[reducer]

    def _chance(self, reducer: int) -> float:
        return chance_for(self._options.audit, len(self._senders - {reducer}))

    def _case(
        self,
        part: Part,
        statement: Statement,
        senders: Sequence[int],
        weights: Sequence[float],
        average: TensorMessage | None,
        inputs: Sequence[Input],
        messages: Sequence[TensorMessage],
    ) -> Case:
        members = tuple(member.peer_id for member in self._mates.group.members)
        terms = Terms(
            part.index, part.reducer, len(self._senders), part.descriptor, part.codec, self._options.aggregator
        )
        given, shown = tuple(inputs), tuple(messages)
        return Case(self.where, members, terms, statement, tuple(senders), tuple(weights), average, given, shown)


def _plain(inputs: Inputs, part: Part) -> TensorMessage:
    """A reducer's own input of a part, which travels only to auditors."""
    return NoCompression().compress(inputs.part(part))
