from collections.abc import Iterator

import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.communicator.maker import Maker
from nexar.communicator.settling import Completed
from nexar.config import Config
from nexar.errors import LinkClosed
from nexar.group import deadline_after
from tests.ranks import PATIENCE, on_every


@pytest.fixture
def pair() -> Iterator[list[Communicator]]:
    with local_communicators(2, Config()) as made:
        yield made


def maker_of(comm: Communicator) -> Maker:
    return comm._presence.lineage._maker


def is_open(comm: Communicator) -> bool:
    """Whether the communicator that the tests make is there on its node."""
    router = comm._group.router
    with router.lock:
        return router.find(77, comm.epoch) is not None


def test_what_it_makes_is_independent_and_closed_alone(pair: list[Communicator]) -> None:
    made = on_every(pair, lambda comm: maker_of(comm).make(comm.membership, 77, deadline_after(PATIENCE))[0])
    assert [is_open(comm) for comm in pair] == [True, True]
    branch = made[0]
    assert (branch.communicator, branch.group.size) == (77, 2)
    assert branch.assembly.journal is not pair[0]._assembly.journal
    branch.close()
    branch.close()
    assert [is_open(comm) for comm in pair] == [False, True]
    made[1].close()
    assert on_every(pair, lambda comm: comm.all_reduce(1)) == [2, 2]


def test_who_succeeds_another_one_learns_how_far_all_had_come(pair: list[Communicator]) -> None:
    made = on_every(
        pair,
        lambda comm: maker_of(comm).make(
            comm.membership, 77, deadline_after(PATIENCE), completed=Completed(1, 5 + comm.rank)
        ),
    )
    assert [least for _, least in made] == [5, 5]
    for branch, _ in made:
        branch.close()


def test_who_closes_the_group_meanwhile_ends_the_making_and_nothing_is_left(pair: list[Communicator]) -> None:
    maker = maker_of(pair[0])
    with pytest.raises(LinkClosed):
        maker.make(
            pair[0].membership,
            77,
            deadline_after(PATIENCE),
            completed=Completed(1, 1),
            begun=lambda group: group.close(),
        )
    assert not is_open(pair[0])
