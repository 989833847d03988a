"""Children whose end is reported before the cluster has formed."""

import pytest

from nexar.cluster.decisions.admission_events import ChildDied, Note
from nexar.cluster.decisions.children import Children
from nexar.cluster.decisions.formation import Formation
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.refusals import Refusal
from nexar.cluster.membership import Attendant
from tests.unit.cluster.decisions.door import SEED, hello, key

LAUNCHER = Guest(51, "10.0.0.9:51", hello(51, "launcher"))


def a_formation() -> Formation:
    formation = Formation("cluster", 2, SEED)
    formation.reserve(Attendant(51, key(51)), 1, 0)
    return formation


def test_one_that_died_is_waited_for_in_vain_and_one_that_ended_well_when_somebody_waits() -> None:
    children, formation = Children({51: LAUNCHER}), a_formation()
    died = ChildDied(51, 0, "killed")
    assert children.ended(formation, LAUNCHER, died, somebody_waits=False) == (
        Note("child died", "10.0.0.9:51", None, 0, "killed"),
        True,
    )
    well = ChildDied(51, 0, "done", well=True)
    assert children.ended(formation, LAUNCHER, well, somebody_waits=True)[1]
    assert children.missing == []
    assert not children.ended(formation, LAUNCHER, well, somebody_waits=False)[1]
    assert children.missing == [well]
    children.forget(51)
    children.forget(51)
    assert children.missing == []


def test_one_without_a_rank_is_not_waited_for() -> None:
    children = Children({51: LAUNCHER})
    assert not children.ended(Formation("c", 2, SEED), LAUNCHER, ChildDied(51, 7, "killed"), somebody_waits=True)[1]


def test_nobody_reports_the_children_of_others() -> None:
    children, formation = Children({51: LAUNCHER}), a_formation()
    with pytest.raises(Refusal, match="rank 1 as its child, which it is not"):
        children.ended(formation, LAUNCHER, ChildDied(51, 1, "killed"), somebody_waits=True)
    with pytest.raises(Refusal, match="is no launcher"):
        children.ended(formation, Guest(52, "x", hello(52)), ChildDied(52, 0, "killed"), somebody_waits=True)
