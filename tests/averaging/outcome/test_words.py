"""What one member signs and keeps: each word once, and of others no more than proves that they lie."""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as changed

from swarmcli.averaging.certificate import NOTHING, Kind, RoundCertificate, sign_word
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.round.messages import RoundWord
from swarmcli.averaging.round.outcome import Action, Next, RoundOutcome, Sheet, View
from swarmcli.network import Identity, wire

RESULT = b"result".ljust(32)


class Company:
    """A list of `count` strangers, and the outcome as the first of them knows it."""

    def __init__(self, count: int) -> None:
        self.keys = [Identity.from_seed(number) for number in range(count)]
        self.group = Group.form(b"", [Member(key.peer_id) for key in self.keys], [1.0] * count, bytes(16))
        self.outcome = RoundOutcome(self.group, self.keys[0])

    def sheet(self, kind: Kind, digest: bytes, *signers: int) -> Sheet:
        signed = {each: sign_word(self.keys[each], self.group.group_id, kind, digest) for each in signers}
        return Sheet(kind, digest, signed)

    def hear(self, kind: Kind, digest: bytes, *signers: int) -> bool:
        return self.outcome.learn((self.sheet(kind, digest, *signers),))


def other(number: int) -> bytes:
    return b"other %d" % number + bytes(32 - len(b"other %d" % number))


def test_who_has_voted_never_gives_up_and_who_gave_up_never_votes() -> None:
    voter, quitter = Company(4), Company(4)
    for each in (voter, quitter):
        assert each.outcome.echo(RESULT) and not each.outcome.echo(other(1))
        each.hear("echo", RESULT, 1, 2)
    assert voter.outcome.vote(RESULT) and not voter.outcome.give_up() and not voter.outcome.vote(other(1))
    assert quitter.outcome.give_up() and not quitter.outcome.vote(RESULT)
    signed = [(sheet.kind, sheet.digest) for sheet in voter.outcome.beyond((), {0})]
    assert sorted(signed) == [("echo", RESULT), ("vote", RESULT)]


def test_who_has_echoed_and_neither_voted_nor_given_up_is_waited_for_while_it_is_in_reach() -> None:
    company = Company(4)
    company.outcome.echo(RESULT)
    company.hear("echo", RESULT, 1, 2)
    company.outcome.vote(RESULT)
    company.hear("vote", RESULT, 1)
    view = View(holds=RESULT, ended=True, reach=frozenset({1, 2}), asked=True)
    assert company.outcome.move(view) == Next(Action.WAIT)
    assert company.outcome.move(replace(view, reach=frozenset({1}))) == Next(Action.UNDECIDED)
    company.hear("give-up", NOTHING, 2)
    assert company.outcome.move(view) == Next(Action.UNDECIDED)


def test_of_a_member_that_signs_without_end_two_words_are_kept_and_one_proof() -> None:
    company = Company(4)
    heard = [company.hear("vote", other(number), 3) for number in range(100)]
    assert heard == [True] * 2 + [False] * 98
    assert len(company.outcome.seen) == 2
    assert company.outcome.proofs.keys() == {3} and company.outcome.proofs[3].verify()


def test_liars_that_name_many_results_do_not_keep_an_honest_member_from_being_heard() -> None:
    """Five of 16 sign all that is kept of them. What the others hear fits into one message."""
    company = Company(16)
    assert company.outcome.echo(RESULT)
    for liar in range(11, 16):
        for number in range(2):
            company.hear("echo", other(10 * liar + number), liar)
            company.hear("vote", other(10 * liar + number), liar)
    company.hear("echo", RESULT, *range(1, 11))
    assert company.outcome.vote(RESULT)
    company.hear("vote", RESULT, *range(1, 10))
    word = RoundWord(company.group.group_id, "running", seen=company.outcome.seen, known=company.outcome.beyond(()))
    said = wire.decode(RoundWord, wire.encode(word))
    honest = {sheet.kind: len(sheet.signatures) for sheet in said.known if sheet.digest == RESULT}
    assert honest == {"echo": 11, "vote": 10}


def test_a_certificate_counts_each_key_once_and_no_one_from_outside_of_its_list() -> None:
    company = Company(4)
    votes = company.sheet("vote", RESULT, 0, 1, 2).signatures
    good = RoundCertificate.of(company.group, "strangers", RESULT, votes)
    assert good.verify()
    for wrong in (dict(list(votes.items())[:2]), {**votes, 3: votes[2]}, {**votes, 4: votes[2]}):
        assert not RoundCertificate.of(company.group, "strangers", RESULT, wrong).verify()
    alone = changed(good, peers=(company.keys[0].peer_id,) * 4)  # one key, four times
    signed = sign_word(company.keys[0], alone.group_id, "vote", RESULT)
    assert not changed(alone, votes=dict.fromkeys(range(4), signed)).verify()
