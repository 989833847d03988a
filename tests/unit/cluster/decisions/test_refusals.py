"""The list of refusals is bounded in every direction, and counts what it forgets."""

from nexar.cluster.decisions.admission_checks import Incompatible
from nexar.cluster.decisions.refusals import NoRanksLeft, Refusal, RefusalLog, brief
from nexar.wire.join import MAX_REFUSALS


def test_the_newest_are_listed_and_all_are_counted() -> None:
    refusals = RefusalLog()
    for number in range(1000):
        refusals.add(f"stranger {number}", "no")
    assert (len(refusals), refusals.count) == (MAX_REFUSALS, 1000)
    listed = refusals.listed()
    assert "stranger 999" in listed
    assert "stranger 0" not in listed


def test_a_reason_is_one_short_line_whatever_an_unauthenticated_peer_wrote() -> None:
    assert brief("plain words, ünïcode too") == "plain words, ünïcode too"
    assert brief("a\nb\x1b[2Jc\u2028d") == "a b [2Jc d"
    assert brief("x" * 10_000) == "x" * 199 + "…"
    assert brief("x" * 200) == "x" * 200


def test_the_last_reason_for_the_same_peer_counts() -> None:
    refusals = RefusalLog()
    refusals.add("somebody", "first")
    refusals.add("somebody", "second")
    assert refusals.listed() == {"somebody": "second"}
    assert refusals.count == 2


def test_one_that_is_turned_away_again_and_again_hides_nobody() -> None:
    refusals = RefusalLog()
    refusals.add("somebody", "no")
    for _ in range(1000):
        refusals.add("a flood", "no")
    assert refusals.listed() == {"somebody": "no", "a flood": "no"}
    assert refusals.count == 1001


def test_the_code_is_that_of_the_class_unless_another_is_given() -> None:
    assert Refusal("full", "incompatible").code == ""
    assert Refusal("no", code="not_elastic").code == "not_elastic"
    assert NoRanksLeft("incompatible").code == "full"
    assert Incompatible("full").code == "incompatible"
