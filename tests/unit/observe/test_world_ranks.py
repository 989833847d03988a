from nexar.observe.world_ranks import Seen, world_ranks

SEEN = [Seen(4, "b", 0), Seen(1, "a", 0), Seen(1, "b", 1), Seen(9, "c", 1)]


def test_what_counts_is_the_last_generation_of_the_world_up_to_that_one() -> None:
    assert world_ranks(SEEN, 3)["b"] == 1
    assert world_ranks(SEEN, 4)["b"] == 0
    assert world_ranks(SEEN, 20)["b"] == 0


def test_who_came_later_has_its_first_rank_and_who_is_gone_its_last() -> None:
    assert world_ranks([*SEEN, Seen(12, "c", 0)], 3) == {"a": 0, "b": 1, "c": 1}
    assert world_ranks(SEEN, 9)["a"] == 0


def test_nobody_seen_has_no_rank() -> None:
    assert world_ranks([], 1) == {}
