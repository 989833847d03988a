"""Schedules and the comparison of what ranks report."""

from nexar_tools.kill_schedules.agreement import Agreement
from nexar_tools.kill_schedules.schedule import LEAST, MOST, Schedule, draw_schedule

SCHEDULES = [draw_schedule(1, number, size) for number in range(500) for size in range(LEAST, MOST + 1)]


def size_of(index: int) -> int:
    return LEAST + index % (MOST + 1 - LEAST)


def test_the_same_numbers_give_the_same_schedule() -> None:
    assert draw_schedule(1, 7, 5) == draw_schedule(1, 7, 5) != draw_schedule(2, 7, 5)


def test_half_of_the_ranks_stay() -> None:
    for index, schedule in enumerate(SCHEDULES):
        gone = [*schedule.victims, *(rank for rank in (schedule.leaver, schedule.closer) if rank is not None)]
        assert len(gone) == len(set(gone)) <= size_of(index) // 2


def test_every_kind_of_kill_is_drawn() -> None:
    def kind(schedule: Schedule) -> str:
        if len(schedule.kills) == 1:
            return "at once" if len(schedule.kills[0].victims) == 2 else "one"
        return "recovery" if schedule.kills[1].step is None else "later"

    assert {kind(schedule) for schedule in SCHEDULES} == {"one", "at once", "recovery", "later"}
    assert all(any(rank in schedule.victims for schedule in SCHEDULES) for rank in range(MOST))


def test_a_rank_leaves_at_its_step() -> None:
    for schedule in SCHEDULES:
        assert [step.kind for step in schedule.steps].count("leave") == (schedule.leaver is not None)


def test_different_values_for_the_same_key_are_found() -> None:
    agreement = Agreement()
    first = {"name": "agree", "key": [0, 2, 1], "value": [7, 1]}
    assert agreement.add("rank-0", first) is None
    assert agreement.add("rank-1", first) is None
    assert agreement.add("rank-1", {**first, "key": [0, 3, 1], "value": [8, 1]}) is None
    found = agreement.add("rank-2", {**first, "value": [8, 1]})
    assert found == "agree [0, 2, 1]: rank-0 has [7, 1], rank-2 has [8, 1]"
