import random
import signal
import sys
from pathlib import Path

from nexar_tools.member_process import MemberProcess
from nexar_tools.soak.campaign import LEAST, MOST, next_action
from tests.ranks import EVENT_TIMEOUT


def many(alive: int, killable: list[str]) -> list[object]:
    chance = random.Random(5)
    return [next_action(chance, alive, killable) for _ in range(2000)]


def test_starts_are_three_of_five_and_deaths_the_rest() -> None:
    steps = many(5, ["a", "b"])
    starts = sum(step is not None and step.victim is None for step in steps)
    assert 1100 < starts < 1300
    assert {step.victim for step in steps} == {None, "a", "b"}
    assert all(0.5 <= step.pause <= 2.0 for step in steps)


def test_there_are_never_too_many_or_too_few() -> None:
    assert all(step is None or step.victim == "a" for step in many(MOST, ["a"]))
    assert all(step is None or step.victim is None for step in many(LEAST, ["a"]))


def test_nobody_is_killed_who_must_not_be() -> None:
    assert all(step is None or step.victim is None for step in many(5, []))


def test_the_same_seed_has_the_same_luck() -> None:
    assert many(5, ["a", "b", "c"]) == many(5, ["c", "b", "a"])


def start(folder: Path, program: str) -> MemberProcess:
    return MemberProcess("one", [sys.executable, "-c", program], folder, {})


def test_what_it_says_is_read_once_and_in_whole_lines(tmp_path: Path) -> None:
    process = start(tmp_path, """print('{"step": 1}'); print('{"step": 2}'); print('{"st', end='')""")
    assert process.end(EVENT_TIMEOUT)
    assert list(process.reports()) == [{"step": 1}, {"step": 2}]
    assert list(process.reports()) == []
    assert process.exit_code == 0


def test_what_it_complained_of_is_reported_with_how_it_ended(tmp_path: Path) -> None:
    process = start(tmp_path, "raise SystemExit('too bad')")
    assert process.end(EVENT_TIMEOUT)
    assert process.describe() == f"one (process {process.pid}) ended with 1:\ntoo bad\n"


def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; time.sleep(600)")
    assert not process.end(0.1)
    assert process.exit_code == -signal.SIGKILL
