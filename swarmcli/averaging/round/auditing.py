"""Audits in a round: senders sign their parts, reducers sign for what came, members check some of it before they vote.

    sender    SenderTerms(hash of a secret), parts, each with a signature              ─▶ reducer
    reducer   averages, Farewell(signature over their digests and the inputs' hashes)  ─▶ member
    member    DrawnPart(secret and signature, which name the part)  ─▶ reducer, which lists the inputs' signatures
                                                                    ─▶ senders, each of which sends its own again
    member    computes the average again. If it is false: Accusation with all that proves it ─▶ all other members,
              which compute it again as well

`audit/` has the signatures, draws and proofs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from swarmcli.averaging.audit.signed import (
    Exchange,
    Input,
    SignedAverages,
    chance_for,
    commitment,
    drawn,
    inputs_hash,
    part_hash,
)
from swarmcli.averaging.audit.verdict import ACCUSED_BEYOND, FalseAverage, PartClaim, Terms
from swarmcli.averaging.certificate import DIGEST_BYTES
from swarmcli.averaging.round.buffers import Average, Inputs, Results
from swarmcli.averaging.round.faults import CommonMeans
from swarmcli.averaging.round.messages import Accusation, DrawnPart, Exhibit, InputHeader, InputList, at_most
from swarmcli.averaging.round.plan import Part
from swarmcli.averaging.trust import PeerTrust
from swarmcli.compression import NoCompression, TensorHeader, TensorMessage
from swarmcli.compression.base import dtype_name
from swarmcli.concurrency import forget, forgetful, on_executor, unless_silent
from swarmcli.errors import CallRefused, InputRefused, NetworkError, PeerUnreachable, ProtocolViolation
from swarmcli.network import Stream

TO_GIVE = 30.0  # seconds for all parts of one reducer that a member checks
TO_HEAR = 20.0  # seconds for a whole accusation at one member: after that it would come too late
SILENCE = 5.0  # seconds without an answer, or a byte of an input
ASKS = 2  # times that a member asks for one input, and that a sender gives it: the first stream may break

T = TypeVar("T")


class Audits:
    """One member's part in the audits of one try: as a sender, as a reducer and as an auditor."""

    def __init__(
        self,
        means: CommonMeans,
        prefix: str,
        trust: PeerTrust,
    ) -> None:
        """The senders are the auditors. `trust` gets the proofs; the faults in `means` get the members that do not show
        what they signed."""
        self._mates = mates = means.mates
        self.where, self.group = Exchange(prefix, mates.group.group_id), mates.group
        self.liars: set[int] = set()  # reducers: this member has seen a proof against each
        self._plan, self._options, self._senders = means.plan, means.options, means.senders
        self._signed, self._faults, self._trust = means.signed, means.faults, trust
        self._inputs = means.mine
        self._commitments: dict[int, bytes] = {}  # other member → the hash of its secret
        # A signature: no other member can guess it, and it takes no random numbers, so a run depends on its seed alone.
        self._secret = commitment(mates.endpoint.identity.sign("audit", prefix.encode(), self.where.group_id))
        self._signatures: dict[tuple[int, int], Input] = {}  # (part that is reduced here, sender) → what it signed
        self._lists: dict[int, tuple[Input, ...]] = {}  # part → the inputs for which this reducer has signed
        self._draws: dict[tuple[int, int], tuple[bytes, bytes]] = {}  # (auditor, reducer) → secret, signature it showed
        self._given = Counter[tuple[int, int]]()  # (auditor, part) → times
        self._accused = set[int]()  # members that have accused a reducer

    def leave(self) -> None:
        """This member's part in the try is over: its tensors may change. It can still hear accusations."""
        self._inputs = None
        self._signatures.clear()
        self._lists.clear()

    # As a sender

    @property
    def commitment(self) -> bytes:
        """The hash of the secret by which this member will draw among the parts of each reducer."""
        return commitment(self._secret)

    def sign(self, part: Part, weight: float, message: TensorMessage) -> bytes:
        """Signs a part as this member sends it. Any thread may call it."""
        return self.where.sign(self._mates.endpoint.identity, part.index, weight, part_hash(message))

    async def give(self, member: int, request: DrawnPart, stream: Stream) -> None:
        """Gives an auditor this member's input of a part that the auditor has drawn. Raises CallRefused for any other
        part, and after the round."""
        part = self._part(member, request)
        if self._given[member, part.index] >= ASKS:
            raise CallRefused("not drawn", "this member had the part before")
        self._given[member, part.index] += 1
        message = await self._own_input(part)
        if message is None:
            raise CallRefused("over", "the round is settled, and the input has changed")
        await stream.send(InputHeader(message.header), message.payload)

    async def _own_input(self, part: Part) -> TensorMessage | None:
        """A copy of what this member sent; None if its tensors may have changed, as they do when the round ends."""
        inputs = self._inputs
        if inputs is None:
            return None

        def copied() -> TensorMessage:
            message = self._encoded(inputs, part)
            return TensorMessage(message.header, tuple(memoryview(piece).tobytes() for piece in message.payload))

        message = await on_executor(part.descriptor.nbytes, copied)
        return message if self._inputs is inputs else None

    def _encoded(self, inputs: Inputs, part: Part) -> TensorMessage:
        """Encodes a part as it is sent; without a codec if this member reduces it, since only auditors get that."""
        codec = NoCompression() if part.reducer == self._mates.me else part.codec
        return codec.compress(inputs.part(part))

    # As a reducer

    def begin(self, member: int, committed: bytes | None) -> None:
        """A member's first message is here. Raises InputRefused for one without a commitment."""
        if committed is None:
            raise InputRefused("it takes no part in audits, as this run demands")
        self._commitments[member] = committed

    @forgetful
    async def check(
        self, part: Part, sender: int, weight: float, signature: bytes | None, message: TensorMessage
    ) -> None:
        """A part has arrived. Raises InputRefused unless its sender has signed it."""
        content = await on_executor(message.payload_size, part_hash, message)
        peer = self._mates.peer(sender)
        if signature is None or not self.where.is_signed(peer, part.index, weight, content, signature):
            raise InputRefused(f"part {part.index} is not what its sender signed")
        self._signatures[part.index, sender] = Input(sender, weight, weight, content, signature)

    def note_inputs(self, part: Part, counted: Mapping[int, float]) -> bytes:
        """The sum of a part holds these members' tensors with these weights. Returns the hash of the inputs, which this
        reducer signs. Any thread may call it, for one part at a time."""
        me, inputs = self._mates.me, self._inputs
        if me in counted and inputs is not None:
            message, weight = self._encoded(inputs, part), inputs.weight
            signature = self.sign(part, weight, message)
            self._signatures[part.index, me] = Input(me, weight, weight, part_hash(message), signature)
        given = (self._signatures[part.index, sender] for sender in counted)
        self._lists[part.index] = tuple(replace(each, counts=counted[each.sender]) for each in given)
        return inputs_hash(self._lists[part.index])

    def list_inputs(self, member: int, request: DrawnPart) -> InputList:
        """Tells an auditor for which inputs this reducer has signed. Raises CallRefused for a part that the auditor has
        not drawn, and after the round."""
        part = self._part(member, request)
        if part.index not in self._lists:
            raise CallRefused("over", "nothing is signed here, or the round is settled")
        mine, committed = self._signed.told.get(self._mates.me), self._commitments.get(member)
        if request.averages != mine or commitment(request.secret) != committed:
            raise CallRefused("not drawn", "this member has committed itself to another secret")
        return InputList(self._lists[part.index])

    # As an auditor

    @forgetful
    async def look_at(
        self, reducer: int, averages: Sequence[Average], signed: SignedAverages, results: Results
    ) -> None:
        """Computes some averages of a reducer again, which has signed all of them, and accuses it if one is false.
        Notes members that do not show what they signed. `averages`: all of the reducer's, which are here."""
        numbers, found = tuple(average.part.index for average in averages), None
        names = set(drawn(self._secret, signed.signature, numbers, self._chance(reducer)))
        tables = b"".join(each.digest for each in averages) + b"".join(each.inputs for each in averages)
        chosen = [each for each in averages if each.part.index in names and each.senders]
        with suppress(TimeoutError):  # some line is too slow for that: nobody is at fault
            async with asyncio.timeout(TO_GIVE):
                for average in chosen:
                    proof = await self._fetch(average, signed, tables, results)
                    nbytes = self._options.aggregator.passes * average.part.descriptor.nbytes * len(average.senders)
                    if proof is not None and await on_executor(nbytes, proof.verify, ACCUSED_BEYOND):
                        found = proof
                        break
        if found is not None:
            await self._accuse(found)

    async def _fetch(
        self, average: Average, signed: SignedAverages, tables: bytes, results: Results
    ) -> FalseAverage | None:
        """Fetches all that shows whether an average is false; None: its reducer did not show the list of inputs. Asks
        for list and inputs at the same time, since the members have them only until the round is settled."""
        part, me = average.part, self._mates.me
        request = DrawnPart(self.where.group_id, self._secret, signed, part.index)
        own = await self._own_input(part)
        async with asyncio.TaskGroup() as tasks:
            asked = {each: tasks.create_task(self._ask(each, request, part)) for each in self._senders - {me}}
            listing = tasks.create_task(self._ask_for_list(average, request))
        inputs = listing.result()
        shown = {each: task.result() for each, task in asked.items()} | {me: own}
        messages = {each: message for each, message in shown.items() if isinstance(message, TensorMessage)}
        if inputs is None:
            return None
        # A copy: the next try may write to that memory while others still check the proof.
        content = NoCompression().compress(results.part(part).clone())
        claim = PartClaim(part.index, average.senders, average.weights, inputs, signed)
        proof = self._proof(part, claim, tables, content, messages)
        for each in inputs:
            said = shown.get(each.sender)
            if isinstance(said, str) or (isinstance(said, TensorMessage) and not proof.shows(each)):
                withheld = said if isinstance(said, str) else "it showed another input than it signed"
                self._faults.suspects.setdefault(each.sender, withheld)
        return proof

    async def _ask_for_list(self, average: Average, request: DrawnPart) -> tuple[Input, ...] | None:
        mates, reducer = self._mates, average.part.reducer

        async def ask() -> tuple[Input, ...]:
            answer = await mates.endpoint.call(
                mates.peer(reducer), mates.method("inputs"), request, InputList, timeout=SILENCE
            )
            if inputs_hash(answer.inputs) != average.inputs:
                raise ProtocolViolation("the inputs are not those that it signed for")
            return answer.inputs

        inputs = await self._unless_withheld(reducer, ask)
        if isinstance(inputs, str):
            self._faults.suspects.setdefault(reducer, inputs)
        return inputs if isinstance(inputs, tuple) else None

    async def _ask(self, sender: int, request: DrawnPart, part: Part) -> TensorMessage | str | None:
        mates = self._mates

        async def ask() -> TensorMessage:
            peer, method = mates.peer(sender), mates.method("input")
            async with mates.endpoint.stream(peer, method, request, timeout=SILENCE) as stream:
                return await self._receive_input(part, stream)

        return await self._unless_withheld(sender, ask)

    async def _unless_withheld(self, member: int, ask: Callable[[], Awaitable[T]]) -> T | str | None:
        """Asks a member for what it signed, a second time if the connection breaks. Returns the answer; a reason if the
        member withholds it; None if nobody is at fault."""
        for _ in range(ASKS):
            try:
                return await ask()
            except TimeoutError as error:
                forget(error)
                return "it fell silent instead of showing what it signed"
            except PeerUnreachable as error:
                forget(error)
                return None
            except (CallRefused, ProtocolViolation) as error:
                forget(error)
                over = isinstance(error, CallRefused) and error.code == "over" and await self._has_left(member)
                return None if over else f"it did not show what it signed: {error}"
            except NetworkError as error:
                forget(error)
        self._faults.lost.add(member)
        return "its connections broke before it showed what it signed"

    async def _has_left(self, member: int) -> bool:
        """Whether the round is over at a member, by its own word."""
        word = await self._mates.state(member)
        return word is not None and (word.settled or word.standing == "over")

    async def _receive_input(self, part: Part, stream: Stream) -> TensorMessage:
        """Raises NetworkError (ProtocolViolation for more than the plan has) and TimeoutError."""
        most = max(part.payload_bound, part.descriptor.nbytes)
        async with unless_silent(stream, SILENCE):
            header, payload = await stream.receive(InputHeader, at_most(most))
        return TensorMessage(header.tensor, (payload,) if payload.nbytes else ())

    # Accusations

    async def _accuse(self, proof: FalseAverage) -> None:
        """Shows all other members the proof that an average is false; returns when they have judged it, or cannot."""
        self._convict(proof)
        async with asyncio.TaskGroup() as tasks:
            for member in self._mates.others:
                if member != proof.terms.reducer:
                    tasks.create_task(self._show(member, proof))

    @forgetful
    async def _show(self, member: int, proof: FalseAverage) -> None:
        mates, header = self._mates, Accusation(self.where.group_id, proof.claim)
        peer, method = mates.peer(member), mates.method("accuse")
        try:
            async with asyncio.timeout(TO_HEAR), mates.endpoint.stream(peer, method, header, timeout=TO_HEAR) as stream:
                await stream.send(Exhibit(), (proof.tables,))
                await stream.send(Exhibit(), () if proof.average is None else proof.average.payload)
                for each in proof.claim.inputs:
                    message = proof.messages.get(each.sender, _NOTHING)
                    await stream.send(InputHeader(message.header), message.payload)
                await stream.finish()
                await stream.receive(Exhibit)  # nothing comes: the stream ends when the member has judged
        except (NetworkError, TimeoutError) as error:
            forget(error)

    @forgetful
    async def hear(self, accuser: int, header: Accusation, stream: Stream) -> None:
        """Another member accuses a reducer: this one bans the reducer if the proof holds, and otherwise suspects the
        accuser. Raises CallRefused for a part that no other member reduces, and for a second accusation by the same
        member, and the stream's errors."""
        part = self._plan.part(header.claim.part)
        if part is None or part.reducer == self._mates.me or accuser in self._accused:
            raise CallRefused("accusation", "it is of no other reducer's part, or this member has accused before")
        self._accused.add(accuser)
        async with asyncio.timeout(TO_HEAR):
            nbytes, tables = part.descriptor.nbytes, 2 * DIGEST_BYTES * len(self._plan.by_reducer[part.reducer])
            exhibits = [(await stream.receive(Exhibit, at_most(most)))[1] for most in (tables, nbytes)]
            plain = TensorHeader("none", dtype_name(part.descriptor.dtype), part.descriptor.shape)
            average = TensorMessage(plain, (exhibits[1],)) if header.claim.senders else None
            senders = [each.sender for each in header.claim.inputs]
            # A list that names a sender twice, or one that is no member, proves the lie alone: then no input is taken.
            named = senders == sorted({*senders} & {*range(len(self.group))})
            messages = dict[int, TensorMessage]()
            proof = self._proof(part, header.claim, bytes(exhibits[0]), average, messages)
            signed = await on_executor(nbytes, proof.is_signed)
            for each in header.claim.inputs if named and signed else ():  # none after one that its sender did not sign
                messages[each.sender] = await self._receive_input(part, stream)
                if not await on_executor(nbytes, proof.shows, each):
                    break
        if signed and await on_executor(nbytes * len(messages), proof.verify):
            self._convict(proof)
        else:
            self._trust.suspect(self._mates.peer(accuser), "it called an average false that is true")

    def _convict(self, proof: FalseAverage) -> None:
        """Bans the culprit of a proof that was verified; its averages do not count."""
        self.liars.add(proof.terms.reducer)
        self._faults.failed.setdefault(proof.terms.reducer, f"{proof.culprit.short}: {proof.words()}")
        self._trust.ban(proof)

    # As any of them

    def _part(self, member: int, request: DrawnPart) -> Part:
        """The part that an auditor has drawn. Raises CallRefused for another one. Of each reducer only the first secret
        and signature that an auditor shows count: with others it could draw what it likes."""
        part, signed = self._plan.part(request.part), request.averages
        if part is None or not signed.is_by(self._mates.peer(part.reducer), self.where.prefix, self.where.group_id):
            raise CallRefused("not drawn", "its reducer has signed nothing like that")
        shown = request.secret, signed.signature
        named = drawn(*shown, [part.index], self._chance(part.reducer))
        if self._draws.setdefault((member, part.reducer), shown) != shown or not named:
            raise CallRefused("not drawn", "the secret does not name this part, or is not the first one")
        return part

    def _chance(self, reducer: int) -> float:
        return chance_for(self._options.audit, len(self._senders - {reducer}))

    def _proof(
        self,
        part: Part,
        claim: PartClaim,
        tables: bytes,
        average: TensorMessage | None,
        messages: Mapping[int, TensorMessage],
    ) -> FalseAverage:
        members = tuple(member.peer_id for member in self.group.members)
        place = self._plan.by_reducer[part.reducer].index(part)
        how = len(self._senders), part.descriptor, part.codec, self._options.aggregator
        return FalseAverage(
            self.where, members, Terms(part.index, place, part.reducer, *how), claim, tables, average, messages
        )


_NOTHING = TensorMessage(TensorHeader("none", "float32", (0,)), ())  # in place of an input that nobody need see
