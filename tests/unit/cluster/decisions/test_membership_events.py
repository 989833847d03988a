"""A loss: its kind decides, its text is for people."""

import pytest

from nexar.cluster.decisions.membership_events import Loss, LossKind
from nexar.wire.control import MAX_CAUSE_CHARACTERS
from tests.losses import ended, silent


def test_only_a_process_that_ended_or_said_that_it_ends_cannot_be_reached_again() -> None:
    conclusive = {kind for kind in LossKind if Loss(kind, "any words").is_conclusive}
    assert conclusive == {LossKind.ENDED, LossKind.RAISED}


def test_the_order_of_the_kinds() -> None:
    order = [
        LossKind.SEED_CONNECTION_BROKEN,
        LossKind.LINK_BROKEN,
        LossKind.NO_ANSWER,
        LossKind.ENDED,
        LossKind.LAUNCHER_REPORT,
        LossKind.LEFT,
        LossKind.RAISED,
    ]
    assert sorted(LossKind, key=lambda kind: kind.value) == order
    for place, kind in enumerate(order):
        outranked = [other for other in order if Loss(kind, "a").outranks(Loss(other, "b"))]
        assert outranked == order[:place]


def test_a_cause_is_the_text_and_the_end_of_the_traceback() -> None:
    assert silent("no answer").cause == "no answer"
    assert len(silent("x" * 10_000).cause) == MAX_CAUSE_CHARACTERS
    raised = Loss(LossKind.RAISED, "it raised", "x" * MAX_CAUSE_CHARACTERS + "ValueError: the end")
    assert raised.cause.startswith("it raised:\nxxx")
    assert raised.cause.endswith("ValueError: the end")
    assert len(raised.cause) == MAX_CAUSE_CHARACTERS


@pytest.mark.parametrize("hint", [silent("reset"), ended("reset")])
def test_a_loss_after_a_hint_keeps_its_kind_and_says_both(hint: Loss) -> None:
    assert silent("no answer").after(hint) == silent("reset; no answer")
    assert silent("reset").after(hint) == silent("reset")
