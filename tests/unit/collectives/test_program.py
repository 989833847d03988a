from nexar.collectives.program import AHEAD, compile_steps, overlap
from nexar.collectives.schedule import How, Local, Part, Receive, Send, Step


def part(start: int, stop: int, buffer: int = 0) -> Part:
    return Part(buffer, start, stop)


def receive(where: Part, how: How = How.COPY, tag: int = 0) -> Receive:
    return Receive(1, where, tag, how)


def posted_at(steps: tuple[Step, ...], index: int) -> int:
    """When the only receive of step `index` is posted."""
    program = compile_steps(steps)
    (due,) = program.due[index]
    return next(step for step, posts in enumerate(program.posts) if due in posts)


def test_parts_overlap_if_they_share_an_element() -> None:
    assert overlap(part(0, 4), part(3, 5))
    assert not overlap(part(0, 4), part(4, 5))
    assert not overlap(part(0, 4), part(0, 4, buffer=1))


def test_a_receive_is_posted_a_few_steps_ahead_and_no_further() -> None:
    steps = (*(Step() for _ in range(9)), Step(receives=(receive(part(0, 4)),)))
    assert posted_at(steps, 9) == 9 - AHEAD


def test_what_copies_waits_for_the_last_step_that_touches_its_part() -> None:
    reading = Step(sends=(Send(1, part(0, 4), 0),))
    writing = Step(receives=(receive(part(3, 9), tag=1),))
    working = Step(then=(Local(part(8, 9, 1), part(1, 2), How.COPY),))
    last = Step(receives=(receive(part(0, 4)),))
    for before in (reading, writing, working):
        assert posted_at((Step(), before, Step(), last), 3) == 2
    elsewhere = Step(sends=(Send(1, part(4, 8), 0),))
    assert posted_at((Step(), elsewhere, Step(), last), 3) == 0


def test_what_reduces_lands_elsewhere_and_is_posted_early_whatever_happens_to_its_part() -> None:
    steps = (Step(), Step(sends=(Send(1, part(0, 4), 0),)), Step(receives=(receive(part(0, 4), How.LEFT),)))
    (due,) = compile_steps(steps).due[2]
    assert not due.direct
    assert posted_at(steps, 2) == 0


def test_what_copies_over_what_the_same_step_sends_or_receives_lands_elsewhere() -> None:
    both = Step(sends=(Send(1, part(0, 4), 0),), receives=(receive(part(2, 6)),))
    twice = Step(receives=(receive(part(0, 4)), receive(part(2, 6), tag=1)))
    apart = Step(sends=(Send(1, part(0, 4), 0),), receives=(receive(part(4, 6)),))
    directs = [[due.direct for due in compile_steps((step,)).due[0]] for step in (both, twice, apart)]
    assert directs == [[False], [False, False], [True]]
