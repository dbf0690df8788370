"""A model of a round: the real outcome, every order of messages, and a nasty network.

`Round` is one list of a few members. Each step lets one thing happen: an exchange ends, a member asks another one, does
its next move, dies, is frozen, is cut off in one direction or both, or comes back. Liars hold each other's keys, sign
whatever may help them, remember everything that they heard, and show each member what they like, when they like.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field, replace

from swarmcli.averaging.certificate import NOTHING, Kind, sign_word
from swarmcli.averaging.config import Trust
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.round.outcome import Action, Known, Next, RoundOutcome, Sheet, View
from swarmcli.network import PeerID

RESULTS = (b"a" * 32, b"b" * 32)


class Key:
    """Signs as an identity does, a hundred times as fast. Nobody here signs for another one."""

    def __init__(self, index: int) -> None:
        self.peer_id = PeerID(index.to_bytes(32, "big"))

    def sign(self, purpose: str, *fields: bytes) -> bytes:
        return hashlib.sha512(b"".join([self.peer_id, purpose.encode(), *fields])).digest()


def verify(peer: PeerID, purpose: str, signature: bytes, *fields: bytes) -> bool:
    """For `Key`, in the place of the real one."""
    return signature == hashlib.sha512(b"".join([peer, purpose.encode(), *fields])).digest()


@dataclass
class Node:
    """One honest member of a round."""

    outcome: RoundOutcome
    view: View = field(default_factory=View)
    asked: set[int] = field(default_factory=set)  # since the last word that was new here
    busy: set[int] = field(default_factory=set)
    end: Next | None = None
    gone: bool = False  # its process is dead
    frozen: bool = False


class Round:
    """One list. `ends` says how it ended at each member."""

    def __init__(
        self,
        size: int,
        random_: random.Random,
        *,
        liars: int = 0,
        trust: Trust = "strangers",
        deaths: int = 0,
        unlike: float = 0.0,
        lost_parts: float = 0.2,
        cuts: float = 0.1,
        freezes: float = 0.1,
        kind: type[RoundOutcome] = RoundOutcome,
    ) -> None:
        """`deaths` happen at any moment. The others are chances: that a member has been given another result (a reducer
        lied, so there are liars), that one lacks parts, that a direction between two is cut, that a member freezes."""
        self.random, self.size, self.deaths, self.freezes = random_, size, deaths, freezes
        keys = [Key(index) for index in range(size)]
        self.group = Group.form(b"", [Member(key.peer_id) for key in keys], [1.0] * size, bytes(16))
        self.liars = {index: keys[index] for index in random_.sample(range(size), liars)}
        self.nodes = {
            index: Node(kind(self.group, key, trust))  # type: ignore[arg-type]
            for index, key in enumerate(keys)
            if index not in self.liars
        }
        self.holds = {
            index: RESULTS[random_.random() < unlike] if random_.random() >= lost_parts else None
            for index in self.nodes
        }
        self.cut = {(i, j) for i in self.nodes for j in self.nodes if i != j and random_.random() < cuts}
        self.heard = RoundOutcome(self.group, next(iter(self.liars.values()), keys[0]), trust)  # type: ignore[arg-type]
        self.quorum = self.heard.quorum
        for index, key in self.liars.items():  # all that they may ever sign
            for kind_, digests in (("echo", RESULTS), ("vote", RESULTS), ("give-up", (NOTHING,))):
                for digest in digests:
                    self.lie(kind_, digest, index, key)  # type: ignore[arg-type]

    def lie(self, kind: Kind, digest: bytes, index: int, key: Key) -> None:
        signature = sign_word(key, self.group.group_id, kind, digest)  # type: ignore[arg-type]
        self.heard._words.setdefault((kind, digest), {})[index] = signature

    # What happens

    def step(self) -> None:
        happens = [self.ask, self.ask, self.ask, self.act, self.act, self.finish_exchange]
        if self.liars:
            happens += [self.be_told_lies, self.be_told_lies]
        if self.random.random() < 0.1:
            happens = [self.die, self.freeze, self.thaw, self.pass_time]
        self.random.choice(happens)()

    def awake(self) -> list[int]:
        return [index for index, node in self.nodes.items() if not (node.gone or node.frozen)]

    def one(self) -> tuple[int, Node]:
        index = self.random.choice(self.awake() or list(self.nodes))
        return index, self.nodes[index]

    def die(self) -> None:
        if self.deaths and self.awake():
            self.deaths -= 1
            self.one()[1].gone = True

    def freeze(self) -> None:
        if self.random.random() < self.freezes and self.awake():
            self.one()[1].frozen = True

    def thaw(self) -> None:
        for node in self.nodes.values():
            node.frozen = node.frozen and self.random.random() < 0.5

    def pass_time(self) -> None:
        """For one member alone: clocks differ."""
        index, node = self.one()
        if index in self.awake():
            self.finish(index)
            node.view = replace(node.view, late=True, over=node.view.late and self.random.random() < 0.3)

    def finish_exchange(self) -> None:
        self.finish(self.one()[0])

    def finish(self, index: int) -> None:
        if index in self.awake() and not self.nodes[index].view.ended:
            self.nodes[index].view = replace(self.nodes[index].view, ended=True, holds=self.holds[index])

    def ask(self) -> None:
        index, _ = self.one()
        other = self.random.choice([each for each in range(self.size) if each != index] or [index])
        self.meet(index, other)

    def meet(self, index: int, other: int) -> None:
        """A member shows another one what it knows, and hears what that knows: one call."""
        node = self.nodes[index]
        if index not in self.awake() or index == other or (index, other) in self.cut:
            return
        if other in self.liars:
            self.heard.learn(node.outcome.beyond(self.heard.seen))
            return
        if other not in self.awake():
            return
        answerer = self.nodes[other]
        self.tell(answerer, node.outcome.beyond(answerer.outcome.seen))
        if (other, index) in self.cut:
            return  # the answer is lost
        busy = answerer.end is None and answerer.outcome.is_busy(self.seen_by(answerer))
        (node.busy.add if busy else node.busy.discard)(other)
        if not self.tell(node, answerer.outcome.beyond(node.outcome.seen)):
            node.asked.add(other)

    def tell(self, node: Node, known: Known) -> bool:
        new = node.outcome.learn(known)
        if new:
            node.asked.clear()
        return new

    def be_told_lies(self) -> None:
        """Liars show one member some of all that they ever heard or could sign."""
        index, node = self.one()
        shown = list[Sheet]()
        for sheet in self.heard.beyond(()):
            some = {each: signed for each, signed in sheet.signatures.items() if self.random.random() < 0.6}
            shown += [replace_sheet(sheet, some)] if some and self.random.random() < 0.5 else []
        if index in self.awake():
            self.tell(node, tuple(shown))

    def seen_by(self, node: Node) -> View:
        """What the node's own connections show: the dead are out of reach, the frozen are not for a while, and liars
        are there as long as they like."""
        index = node.outcome.me
        reach = {
            other
            for other in range(self.size)
            if other != index
            and (other in self.liars or not self.nodes[other].gone)
            and not {(index, other), (other, index)} & self.cut
        }
        if node.view.over:
            reach = set()
        asked = node.asked >= {other for other in reach if other in self.nodes}
        return replace(node.view, reach=frozenset(reach), busy=frozenset(node.busy & reach), asked=asked)

    def act(self) -> None:
        index, node = self.one()
        if index in self.awake() and node.end is None:
            self.do(index, node, node.outcome.move(self.seen_by(node)))

    def do(self, index: int, node: Node, following: Next) -> None:
        match following:
            case Next(Action.ECHO, bytes(digest)):
                assert node.outcome.echo(digest)
            case Next(Action.VOTE, bytes(digest)):
                assert node.outcome.vote(digest)
            case Next(Action.GIVE_UP):
                assert node.outcome.give_up()
            case Next(Action.FETCH, bytes(digest)):
                self.fetch(index, node, digest)
            case Next(Action.COMMITTED | Action.DEAD | Action.UNDECIDED):
                node.end = following

    def fetch(self, index: int, node: Node, digest: bytes) -> None:
        holders = [
            other
            for other in node.outcome.holders(digest)
            if other in self.awake() and self.nodes[other].view.holds == digest and (index, other) not in self.cut
        ]
        if holders or (self.liars and self.random.random() < 0.3 and digest in self.holds.values()):
            node.view = replace(node.view, holds=digest)
        else:
            node.view = replace(node.view, unobtainable=node.view.unobtainable | {digest})

    # What must hold

    def check(self) -> None:
        """No two results, nor votes for two among strangers; nobody takes for dead a list that may have a result."""
        ends = [node.end for node in self.nodes.values() if node.end is not None]
        committed = {end.digest for end in ends if end.move is Action.COMMITTED}
        assert len(committed) <= 1, "two results"
        voted = {node.outcome.has_signed("vote") for node in self.nodes.values()} - {None}
        assert len(voted) <= 1 or not self.quorum.guarded, "votes of honest members for two results"
        for digest in RESULTS:
            votes = {index for index, node in self.nodes.items() if node.outcome.has_signed("vote") == digest}
            open_ = {index for index, node in self.nodes.items() if not node.outcome.closed}
            possible = votes | open_ | self.liars.keys()
            if any(end.move is Action.DEAD for end in ends):
                assert not self.quorum.decides(possible), "dead, and may have a result yet"

    def settle(self) -> None:
        """Whoever lives can be reached again, and time goes on: all come to an end."""
        self.cut.clear()
        for node in self.nodes.values():
            node.frozen = False
        for index in self.awake():
            self.finish(index)
        for _ in range(4 * self.size + 12):
            for index in self.awake():
                for other in self.awake():
                    self.meet(index, other)
                node = self.nodes[index]
                if node.end is None:
                    self.do(index, node, node.outcome.move(self.seen_by(node)))
        for index in self.awake():  # silent liars keep nobody for ever
            node = self.nodes[index]
            if node.end is None:
                node.view = replace(node.view, late=True, over=True)
                for _ in range(4):
                    self.do(index, node, node.outcome.move(self.seen_by(node)))

    @property
    def ends(self) -> Counter[Action]:
        return Counter(node.end.move for node in self.nodes.values() if node.end is not None)


def replace_sheet(sheet: Sheet, signatures: dict[int, bytes]) -> Sheet:
    return Sheet(sheet.kind, sheet.digest, signatures)
