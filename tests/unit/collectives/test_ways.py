from nexar.collectives.choose import SHARED_MEMORY, TWO_LEVEL
from nexar.collectives.schedules.catalog import CATALOG
from nexar.collectives.ways import Way, name_of_way, way_of


def test_every_algorithm_has_a_number_of_its_own_that_fits_into_a_byte() -> None:
    names = {SHARED_MEMORY, TWO_LEVEL, *(name for algorithms in CATALOG.values() for name in algorithms)}
    numbers = {way_of(name) for name in names}
    assert len(numbers) == len(names) == len(Way)
    assert all(0 < number < 256 for number in numbers)
    assert {name_of_way(number) for number in numbers} == names


def test_what_has_no_number_is_not_stated_and_what_is_not_known_is_named_by_its_number() -> None:
    assert way_of("new_in_the_next_version") == 0
    assert name_of_way(99) == "way 99"
