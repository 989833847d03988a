"""Who is needed though it has left the world is asked for again, until there is a successor without it."""

from nexar.cluster.change import WORLD, Change, Departure
from nexar.communicator.course import Course
from nexar.communicator.needs import Needs
from tests.unit.communicator.scripted import membership

PART = 7
FIRST = membership([1, 2, 3, 4], 1)


class Years:
    """A world, and what its node needs."""

    def __init__(self) -> None:
        self.course = Course(FIRST)
        self.needs = Needs(self.course)

    def leave(self, node: int) -> None:
        self._choose(Change(self.course.world.epoch + 1, left=(Departure(node, "it left", willing=True, quiet=True),)))

    def renew(self, *communicators: int) -> None:
        self._choose(Change(self.course.world.epoch + 1, renewed=communicators))

    def _choose(self, change: Change) -> None:
        self.course.add(change, change.apply(self.course.world))


def test_who_is_still_a_member_is_somebody_elses_matter() -> None:
    years = Years()
    years.needs.add(WORLD, FIRST, 4)
    assert years.needs.unmet() == ()
    years.leave(4)
    assert years.needs.unmet() == (WORLD,), "it was needed before it left"


def test_what_is_needed_is_remembered_until_something_concerns_that_communicator() -> None:
    years = Years()
    years.leave(4)
    years.needs.add(PART, FIRST, 4)
    years.needs.add(WORLD, FIRST, 4)
    for _ in range(2):
        assert years.needs.unmet() == (WORLD, PART)
        years.leave(years.course.world.members[-1].node)
    years.renew(PART)
    assert years.needs.unmet() == (WORLD,)
    years.renew(WORLD)
    assert years.needs.unmet() == ()


def test_a_generation_that_is_over_needs_nobody_and_a_newer_one_counts() -> None:
    years = Years()
    years.leave(4)
    years.renew(PART)
    years.needs.add(PART, FIRST, 4)
    assert years.needs.unmet() == ()
    newer = membership([1, 2, 3], 3)
    years.leave(3)
    years.needs.add(PART, newer, 3)
    years.needs.add(PART, FIRST, 4)
    assert years.needs.unmet() == (PART,)


def test_what_its_user_has_closed_is_forgotten() -> None:
    years = Years()
    years.leave(4)
    years.needs.add(PART, FIRST, 4)
    years.needs.add(PART, FIRST, 3)
    years.needs.forget(PART)
    years.needs.forget(PART)
    assert years.needs.unmet() == ()
