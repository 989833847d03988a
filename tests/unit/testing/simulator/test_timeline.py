"""Virtual time, and the record of it."""

from nexar.testing.simulator.timeline import REMEMBERED, Timeline


def test_what_is_due_happens_in_order_each_at_its_own_time() -> None:
    timeline = Timeline()
    seen: list[tuple[str, float]] = []
    for name, when in (("late", 3.0), ("early", 1.0), ("early too", 1.0), ("never", 9.0)):
        timeline.at(when, lambda name=name: seen.append((name, timeline.now)))  # type: ignore[misc]
    timeline.run_until(5.0)
    assert seen == [("early", 1.0), ("early too", 1.0), ("late", 3.0)]
    assert timeline.now == 5.0


def test_what_is_scheduled_for_the_past_happens_next_and_time_does_not_go_back() -> None:
    timeline = Timeline()
    timeline.run_until(5.0)
    seen: list[float] = []
    timeline.at(1.0, lambda: seen.append(timeline.now))
    timeline.after(1.0, lambda: seen.append(timeline.now))
    timeline.run_until(10.0)
    assert seen == [5.0, 6.0]


def test_the_digest_depends_on_every_line_and_on_its_time() -> None:
    def digest(*lines: tuple[float, str]) -> int:
        timeline = Timeline()
        for when, line in lines:
            timeline.at(when, lambda line=line: timeline.record(line))  # type: ignore[misc]
        timeline.run_until(10.0)
        return timeline.digest

    usual = digest((1.0, "a"), (2.0, "b"))
    assert usual == digest((1.0, "a"), (2.0, "b"))
    assert len({usual, digest((1.0, "a"), (3.0, "b")), digest((1.0, "b"), (2.0, "a")), digest((1.0, "a"))}) == 4


def test_the_last_lines_are_remembered() -> None:
    timeline = Timeline()
    for number in range(REMEMBERED + 5):
        timeline.record(f"line {number}")
    assert len(timeline.last) == REMEMBERED
    assert timeline.last[-1].endswith(f"line {REMEMBERED + 4}")
    assert timeline.events == REMEMBERED + 5
