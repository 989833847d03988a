import random

from nexar.testing.soak.chance import LEAST, MOST, next_step


def many(alive: int, killable: list[str]) -> list[object]:
    chance = random.Random(5)
    return [next_step(chance, alive, killable) for _ in range(2000)]


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
