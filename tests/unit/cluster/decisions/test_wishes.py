"""What a node wants to be different becomes one change."""

from nexar.cluster.change import Change, Departure
from nexar.cluster.decisions.succession_events import Wanted
from nexar.cluster.decisions.suspicions import Suspicions
from nexar.cluster.decisions.wishes import Wishes
from nexar.wire.messages import MAX_CAUSE_CHARACTERS, MAX_MESSAGE_BYTES
from tests.unit.cluster.decisions.parliament import a_member, a_membership

FOUR = a_membership(4)


def some() -> tuple[Wishes, Suspicions]:
    return Wishes(2, FOUR), Suspicions(2, FOUR)


def test_without_a_wish_there_is_nothing_to_propose() -> None:
    wishes, suspicions = some()
    assert wishes.draft(suspicions) is None


def test_a_draft_takes_in_all_that_is_known() -> None:
    wishes, suspicions = some()
    suspicions.add(4, "silence", 1.0)
    bye = Departure(1, "bye", willing=True)
    wishes.want(Wanted(joined=(a_member(9),), left=(bye,), renewed=(7, 5)), 1.0)
    wishes.sever(3, 1.0)
    assert wishes.draft(suspicions) == Change(
        2, left=(Departure(4, "silence"), bye), joined=(a_member(9),), severed=((2, 3),), renewed=(5, 7)
    )
    assert wishes.expects(a_member(9))
    assert not wishes.expects(a_member(8))
    assert wishes.releases(1)


def test_who_has_closed_goes_quietly_unless_it_is_needed_or_all_have_agreed_on_it() -> None:
    wishes, suspicions = some()
    for node in (1, 3, 4):
        suspicions.add(node, "bye", 1.0, willing=True)
    suspicions.add(3, "needed", 2.0)
    wishes.want(Wanted(left=(Departure(4, "it asked for it", willing=True),)), 2.0)
    draft = wishes.draft(suspicions)
    assert draft is not None
    assert [(each.node, each.willing, each.quiet) for each in draft.left] == [
        (1, True, True),
        (3, True, False),
        (4, True, False),
    ]


def test_where_losses_are_no_reason_only_who_has_closed_goes() -> None:
    wishes, suspicions = some()
    suspicions.add(3, "silence", 1.0)
    wishes.severed.add((1, 2))
    assert wishes.draft(suspicions, acting=False) is None
    suspicions.add(4, "bye", 1.0, willing=True)
    draft = wishes.draft(suspicions, acting=False)
    assert draft is not None
    assert ([each.node for each in draft.left], draft.severed) == ([4], ())
    wishes.want(Wanted(renewed=(7,)), 2.0)
    draft = wishes.draft(suspicions, acting=False)
    assert draft is not None
    assert [each.node for each in draft.left] == [3, 4], "it goes along with what was agreed on"
    assert draft.severed == ((1, 2),)


def test_what_was_agreed_on_outlives_a_change_that_leaves_the_world_alone() -> None:
    wishes, _ = some()
    wishes.want(Wanted(joined=(a_member(9),), left=(Departure(1, "bye", willing=True),), renewed=(7,)), 1.0)
    quiet = Change(2, left=(Departure(4, "bye", willing=True, quiet=True),), renewed=(5,))
    kept = wishes.carried(quiet, quiet.apply(FOUR), 2.0)
    assert kept.draft(Suspicions(2, quiet.apply(FOUR))) == Change(
        3, left=(Departure(1, "bye", willing=True),), joined=(a_member(9),)
    )
    loud = Change(2, left=(Departure(4, "killed"),))
    assert wishes.carried(loud, loud.apply(FOUR), 2.0).wanted_since is None


def test_what_is_so_already_is_not_wanted() -> None:
    wishes, suspicions = some()
    wishes.want(Wanted(joined=(a_member(3),), left=(Departure(9, ""),)), 1.0)
    assert wishes.wanted_since is None
    assert wishes.draft(suspicions) is None


def test_a_pair_of_which_one_goes_is_not_severed() -> None:
    wishes, suspicions = some()
    wishes.sever(4, 1.0)
    suspicions.add(4, "silence", 1.0)
    draft = wishes.draft(suspicions)
    assert draft is not None
    assert draft.severed == ()


def test_who_is_suspected_and_released_leaves_once() -> None:
    wishes, suspicions = some()
    suspicions.add(4, "silence", 1.0)
    wishes.want(Wanted(left=(Departure(4, "bye", willing=True),)), 1.0)
    draft = wishes.draft(suspicions)
    assert draft is not None
    assert [departure.node for departure in draft.left] == [4]


def test_who_resigns_proposes_only_that() -> None:
    wishes, suspicions = some()
    suspicions.add(4, "silence", 1.0)
    wishes.resign("done")
    assert wishes.draft(suspicions) == Change(2, left=(Departure(2, "done", willing=True),))
    wishes.stay()
    assert wishes.resigned is None


def test_the_last_one_cannot_be_removed() -> None:
    wishes = Wishes(1, a_membership(1))
    wishes.resign("done")
    assert wishes.draft(Suspicions(1, a_membership(1))) is None


def test_however_many_left_with_long_stories_the_change_fits_into_a_message() -> None:
    many = a_membership(2001)
    suspicions = Suspicions(1, many)
    for node in range(2, 1001):
        suspicions.add(node, "x" * 10_000, 1.0)
    draft = Wishes(1, many).draft(suspicions)
    assert draft is not None
    assert len(draft.encode()) < MAX_MESSAGE_BYTES / 2
    few = Suspicions(1, many)
    few.add(2, "x" * 10_000, 1.0)
    draft = Wishes(1, many).draft(few)
    assert draft is not None
    assert len(draft.left[0].cause) == MAX_CAUSE_CHARACTERS


def test_after_a_change_what_was_agreed_is_over_and_what_broke_is_not() -> None:
    wishes, _ = some()
    wishes.want(Wanted(renewed=(7,)), 1.0)
    wishes.sever(1, 1.0)
    wishes.sever(3, 1.0)
    wishes.sever(4, 1.0)
    wishes.resign("done")
    change = Change(2, left=(Departure(4, ""),), severed=((1, 2),))
    kept = wishes.carried(change, change.apply(FOUR), 5.0)
    assert kept.severed == {(2, 3)}
    assert (kept.severed_since, kept.wanted_since, kept.resigned) == (5.0, None, "done")
    wishes.resign("I cannot reach it", over=3)
    assert wishes.carried(change, change.apply(FOUR), 5.0).resigned is None
