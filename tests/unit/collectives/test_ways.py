from nexar.collectives.choose import SHARED_MEMORY, TWO_LEVEL
from nexar.collectives.schedules.catalog import CATALOG
from nexar.collectives.ways import Way, name_of_way, way_of


def test_every_algorithm_has_a_number_of_its_own_that_fits_into_a_byte() -> None:
    names = {SHARED_MEMORY, TWO_LEVEL, *(name for algorithms in CATALOG.values() for name in algorithms)}
    numbers = {way_of(name) for name in names}
    assert len(numbers) == len(names) == len(Way)
    assert all(0 < number < 32 for number in numbers)
    assert {name_of_way(number) for number in numbers} == names


def test_what_has_no_number_is_not_stated_and_what_is_not_known_is_named_by_its_number() -> None:
    assert way_of("new_in_the_next_version") == 0
    assert name_of_way(30) == "way 30"


def test_what_was_asked_for_is_part_of_a_way() -> None:
    ring = way_of("ring")
    asked = (
        way_of("ring", forced=True),
        way_of("direct", deterministic=True),
        way_of("direct", forced=True, deterministic=True),
    )
    assert len({ring, *asked}) == 4
    assert max(asked) < 256
    assert [name_of_way(each) for each in asked] == [
        "ring, algorithm='ring'",
        "direct, deterministic=True",
        "direct, algorithm='direct', deterministic=True",
    ]
