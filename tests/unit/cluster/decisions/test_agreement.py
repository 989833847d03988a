"""One instance at one node, word by word; the network of many is in tests/hostile."""

from itertools import pairwise
from random import Random

from nexar.cluster.decisions.agreement import Agreement
from nexar.cluster.decisions.succession_events import Say, Word
from nexar.cluster.decisions.vote import LATER, OK, Judgement, Verdict, Vote
from nexar.wire.messages import Accept, Accepted, Chosen, Number, Prepare, Promise, Rejected

HERE = (0, 1, 0)
THREE = frozenset({1, 2, 3})


def an_agreement(me: int = 1, voters: frozenset[int] = THREE, vote: Vote | None = None) -> Agreement:
    return Agreement(HERE, me, voters, random=Random(1), vote=vote)


def words(says: list[Say]) -> dict[int, Word]:
    return {say.node: say.word for say in says}


def ballot(number: int, node: int = 1) -> Number:
    return Number(number, node)


def test_a_single_voter_decides_by_itself() -> None:
    alone = an_agreement(voters=frozenset({1}))
    assert alone.propose(b"v", 0.0) == []
    assert alone.chosen == b"v"


def test_prepare_promise_accept_accepted_chosen() -> None:
    one, two = an_agreement(1), an_agreement(2)
    said = words(one.propose(b"v", 0.0))
    assert said == {2: Prepare(HERE, ballot(1)), 3: Prepare(HERE, ballot(1))}
    (promise,) = two.hear(1, said[2], 0.0)
    said = words(one.hear(2, promise.word, 0.0))
    assert said == {2: Accept(HERE, ballot(1), b"v"), 3: Accept(HERE, ballot(1), b"v")}
    assert one.vote.accepted is None, "the proposer's own vote comes last"
    (accepted,) = two.hear(1, said[2], 0.0)
    said = words(one.hear(2, accepted.word, 0.0))
    assert said == {2: Chosen(HERE, b"v"), 3: Chosen(HERE, b"v")}
    assert one.chosen == one.vote.value == b"v"
    assert two.hear(1, said[2], 0.0) == []
    assert two.chosen == b"v"


def test_who_knows_what_was_chosen_says_so_to_whoever_asks() -> None:
    one = an_agreement(1)
    one.hear(2, Chosen(HERE, b"v"), 0.0)
    for word in (Prepare(HERE, ballot(9, 3)), Accept(HERE, ballot(9, 3), b"w")):
        assert one.hear(3, word, 0.0) == [Say(3, Chosen(HERE, b"v"))]
    assert one.propose(b"w", 0.0) == [] == one.tick(9.0)
    assert one.due(0.0) is None


def test_what_was_chosen_stays_whatever_a_liar_says_later() -> None:
    one = an_agreement(1)
    for sender, value in (2, b"v"), (3, b"v"), (3, b"w"):
        assert one.hear(sender, Chosen(HERE, value), 0.0) == []
    assert one.chosen == b"v"


def test_a_round_that_nobody_reaches_by_outbidding_others_is_not_heard() -> None:
    one, far = an_agreement(1), ballot(2**64 - 1, 3)
    assert one.hear(3, Prepare(HERE, far), 0.0) == [] == one.hear(3, Accept(HERE, far, b"w"), 0.0)
    assert words(one.propose(b"v", 0.0)) == {2: Prepare(HERE, ballot(1)), 3: Prepare(HERE, ballot(1))}
    one.hear(3, Rejected(HERE, ballot(1), far), 0.0)
    assert words(one.tick(9.0)) == {2: Prepare(HERE, ballot(2)), 3: Prepare(HERE, ballot(2))}
    assert one.hear(3, Prepare(HERE, ballot(2**32, 3)), 9.0) == [Say(3, Promise(HERE, ballot(2**32, 3)))]


def test_nobody_outbids_the_highest_number_that_a_message_has_room_for() -> None:
    one = an_agreement(1, vote=Vote(HERE, promised=ballot(2**64 - 1, 3)))
    assert one.propose(b"v", 0.0) == [] == one.tick(9.0)
    assert one.due(9.0) == 9.0 + one.longest_pause, "it looks again, and does not spin"
    assert one.hear(3, Accept(HERE, ballot(2**64 - 1, 3), b"w"), 9.0) == [Say(3, Accepted(HERE, ballot(2**64 - 1, 3)))]


def test_a_learner_is_told_and_has_no_vote() -> None:
    one = Agreement(HERE, 1, frozenset({1}), random=Random(1), learners=(8,))
    assert one.propose(b"v", 0.0) == [Say(8, Chosen(HERE, b"v"))]
    learner = an_agreement(8)
    assert learner.hear(1, Prepare(HERE, ballot(1)), 0.0) == []
    assert learner.hear(1, Accept(HERE, ballot(1), b"v"), 0.0) == []
    learner.hear(1, Chosen(HERE, b"v"), 0.0)
    assert learner.chosen == b"v"


def test_lower_ballots_are_refused_after_a_promise() -> None:
    two = an_agreement(2)
    two.hear(3, Prepare(HERE, ballot(5, 3)), 0.0)
    for word in (Prepare(HERE, ballot(4, 1)), Accept(HERE, ballot(4, 1), b"v")):
        assert two.hear(1, word, 0.0) == [Say(1, Rejected(HERE, ballot(4, 1), ballot(5, 3)))]
    assert two.vote.accepted is None


def test_words_of_who_may_not_say_them_are_ignored() -> None:
    two = an_agreement(2)
    assert two.hear(8, Prepare(HERE, ballot(5, 8)), 0.0) == []
    assert two.hear(3, Prepare(HERE, ballot(5, 1)), 0.0) == [], "a ballot of somebody else"
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    assert one.hear(8, Promise(HERE, ballot(1)), 0.0) == []
    assert one.hear(2, Promise(HERE, ballot(7)), 0.0) == [], "a ballot that is not under way"
    assert one.chosen is None


def test_what_is_found_in_promises_is_proposed_instead() -> None:
    one = an_agreement(1)
    one.propose(b"mine", 0.0)
    assert one.hear(2, Promise(HERE, ballot(1), ballot(0, 3), b"theirs"), 0.0) == [], "a freer majority may come"
    due = one.due(0.0)
    assert due is not None
    assert words(one.tick(due))[2] == Accept(HERE, ballot(1), b"theirs", inherited=True)


def test_a_majority_that_binds_to_nothing_is_preferred() -> None:
    one = an_agreement(1)
    one.propose(b"mine", 0.0)
    one.hear(2, Promise(HERE, ballot(1), ballot(0, 3), b"theirs"), 0.0)
    assert words(one.hear(3, Promise(HERE, ballot(1)), 0.0))[2] == Accept(HERE, ballot(1), b"mine")


def test_words_without_an_answer_are_repeated_ever_more_rarely() -> None:
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    one.hear(2, Rejected(HERE, ballot(7), None), 0.0)
    moments = []
    for _ in range(6):
        due = one.due(0.0)
        assert due is not None
        moments.append(due)
        assert words(one.tick(due)) == {2: Prepare(HERE, ballot(1)), 3: Prepare(HERE, ballot(1))}
    gaps = [round(later - earlier, 3) for earlier, later in pairwise(moments)]
    assert gaps == [0.2, 0.4, 0.5, 0.5, 0.5]


def test_after_a_higher_ballot_it_tries_again_with_one_that_is_higher_still() -> None:
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    assert one.hear(2, Rejected(HERE, ballot(1), ballot(6, 3)), 0.0) == []
    assert one.proposing
    due = one.due(0.0)
    assert due is not None
    assert 0.0 <= due < 1.0
    assert words(one.tick(due))[2] == Prepare(HERE, ballot(7))


def test_a_later_value_is_taken_while_none_was_named() -> None:
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    assert one.propose(b"w", 0.0) == []
    assert words(one.hear(2, Promise(HERE, ballot(1)), 0.0))[2] == Accept(HERE, ballot(1), b"w")
    assert one.propose(b"x", 0.0) == []


def test_who_has_withdrawn_proposes_nothing_more() -> None:
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    one.withdraw()
    assert not one.proposing
    assert one.hear(2, Promise(HERE, ballot(1)), 0.0) == [] == one.tick(9.0)
    assert one.due(0.0) is None


def test_a_judge_may_refuse_and_name_whom_it_reaches() -> None:
    two = an_agreement(2)
    said = two.hear(1, Accept(HERE, ballot(1), b"v"), 0.0, lambda _: Judgement(Verdict.NO, (3,)))
    assert said == [Say(1, Rejected(HERE, ballot(1), None, (3,)))]
    assert two.vote.accepted is None


def test_a_judge_may_take_its_time_and_the_answer_comes_when_it_is_ready() -> None:
    two = an_agreement(2)
    assert two.hear(1, Accept(HERE, ballot(1), b"v"), 0.0, lambda _: LATER) == []
    assert two.rejudge(lambda _: LATER) == []
    assert two.rejudge(lambda _: OK) == [Say(1, Accepted(HERE, ballot(1)))]
    assert two.rejudge(lambda _: OK) == []


def test_a_ballot_that_is_pondered_is_refused_if_a_higher_one_was_promised_meanwhile() -> None:
    two = an_agreement(2)
    two.hear(1, Accept(HERE, ballot(1), b"v"), 0.0, lambda _: LATER)
    two.hear(3, Prepare(HERE, ballot(2, 3)), 0.0)
    assert two.rejudge(lambda _: OK) == [Say(1, Rejected(HERE, ballot(1), ballot(2, 3)))]


def test_what_was_accepted_once_is_not_judged_again() -> None:
    two = an_agreement(2)
    two.hear(1, Accept(HERE, ballot(1), b"v"), 0.0)
    said = two.hear(3, Accept(HERE, ballot(2, 3), b"v"), 0.0, lambda _: Judgement(Verdict.NO))
    assert said == [Say(3, Accepted(HERE, ballot(2, 3)))]


def test_a_proposer_that_promised_a_higher_ballot_cannot_add_its_vote_to_its_own() -> None:
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    one.hear(2, Promise(HERE, ballot(1)), 0.0)
    one.hear(3, Prepare(HERE, ballot(2, 3)), 0.0)
    one.hear(2, Accepted(HERE, ballot(1)), 0.0)
    assert one.chosen is None
    one.hear(3, Accepted(HERE, ballot(1)), 0.0)
    assert one.chosen == b"v", "two others are a majority without it"


def test_a_proposer_that_cannot_vote_for_its_ballot_any_more_begins_a_higher_one() -> None:
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    one.hear(2, Promise(HERE, ballot(1)), 0.0)
    one.hear(3, Prepare(HERE, ballot(2, 3)), 0.0)  # and 3 dies
    one.hear(2, Accepted(HERE, ballot(1)), 0.0)
    assert one.tick(0.1) == [], "a pause, at random"
    assert words(one.tick(1.0))[2] == Prepare(HERE, ballot(3))


def test_who_refused_is_asked_again_and_may_agree() -> None:
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    one.hear(2, Promise(HERE, ballot(1)), 0.0)
    one.hear(2, Rejected(HERE, ballot(1), None, (3,)), 0.0)
    assert words(one.tick(0.1))[2] == Accept(HERE, ballot(1), b"v")
    one.hear(2, Accepted(HERE, ballot(1)), 0.2)
    assert one.chosen == b"v"


def test_a_vote_that_was_kept_binds_who_comes_back_with_it() -> None:
    two = an_agreement(2)
    two.hear(1, Accept(HERE, ballot(3), b"v"), 0.0)
    again = an_agreement(2, vote=Vote.decode(two.vote.encode()))
    assert again.hear(3, Prepare(HERE, ballot(2, 3)), 0.0) == [Say(3, Rejected(HERE, ballot(2, 3), ballot(3)))]
    said = again.hear(3, Prepare(HERE, ballot(4, 3)), 0.0)
    assert said == [Say(3, Promise(HERE, ballot(4, 3), ballot(3), b"v"))]
    assert words(again.propose(b"w", 0.0))[1] == Prepare(HERE, ballot(5, 2))


def test_who_may_have_forgotten_its_vote_has_none() -> None:
    two = Agreement(HERE, 2, THREE, may_vote=False)
    assert two.hear(1, Prepare(HERE, ballot(1)), 0.0) == []
    assert two.hear(1, Accept(HERE, ballot(1), b"v"), 0.0) == []


def test_who_has_not_answered_is_known() -> None:
    one = an_agreement(1)
    assert one.missing() == []
    one.propose(b"v", 0.0)
    assert set(one.missing()) == {2, 3}
    one.hear(2, Promise(HERE, ballot(1)), 0.0)
    assert set(one.missing()) == {1, 2, 3}
