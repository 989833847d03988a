"""The root talks to everybody itself."""

from nexar.arrays.partition import split
from nexar.collectives.schedule import How
from nexar.collectives.schedules import flat


def test_the_root_grows_outwards_so_that_rank_order_is_kept():
    (step,) = flat.reduce(2, 5, 1, root=2)
    assert [(each.peer, each.how) for each in step.receives] == [
        (1, How.LEFT),
        (0, How.LEFT),
        (3, How.RIGHT),
        (4, How.RIGHT),
    ]


def test_only_the_root_has_to_know_the_blocks_of_others():
    mine = split(10, 5)[3]
    unknown = [mine if rank == 3 else None for rank in range(5)]
    (step,) = flat.gather(3, 5, unknown, root=0)
    assert step.sends[0].part == (0, *mine)
    (step,) = flat.scatter(3, 5, unknown, root=0)
    assert step.receives[0].part == (0, *mine)
