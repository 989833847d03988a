from collections.abc import Sequence
from typing import Any

import pytest

from nexar.cluster.membership import Member, Membership
from nexar.communicator import sharing
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.communicator.sharing import LARGEST, Sharing, may_share
from nexar.config import Config
from nexar.errors import OperationTimeout
from nexar.group import deadline_after
from tests.conformance.worlds import ranks_over
from tests.ranks import PATIENCE, on_every


def members(hosts: Sequence[int], capabilities: tuple[str, ...] = ("shm",)) -> Membership:
    made = []
    for host, count in enumerate(hosts):
        made += [
            Member(1 + 100 * host + each, f"h{host}", bytes(32), {}, frozenset(capabilities)) for each in range(count)
        ]
    return Membership("test", 1, tuple(made))


@pytest.mark.parametrize(
    ("hosts", "worth"), [([1], False), ([1, 1], False), ([2], True), ([2, 1], True), ([LARGEST], True), ([9], False)]
)
def test_memory_is_shared_where_a_host_has_several_ranks_and_they_are_not_too_many(
    hosts: list[int], worth: bool
) -> None:
    assert may_share(members(hosts)) == worth
    assert not may_share(members(hosts, ("quic",)))


def test_on_a_sparse_topology_all_ranks_of_each_host_must_be_neighbours() -> None:
    assert not may_share(members([4]), "k_regular:2")
    assert may_share(members([3]), "k_regular:2")
    assert may_share(members([2, 2, 2]), "k_regular:2")  # hosts are runs of ranks
    assert not may_share(members([3, 3]), "k_regular:2")
    assert may_share(members([2, 2]), "hypercube")


def test_ranks_that_are_linked_otherwise_agree_that_they_share_none() -> None:
    def agree(comm: Communicator) -> tuple[bool, object]:
        asked = Sharing(comm._group, deadline_after(PATIENCE))
        return asked.shared, asked.agree(comm._assembly.journal)

    with local_communicators(3, Config()) as world:
        assert on_every(world, agree) == [(False, None)] * 3


def test_who_does_not_take_part_in_time_ends_it_and_leaves_nothing_behind() -> None:
    with local_communicators(2, Config()) as world:
        with pytest.raises(OperationTimeout, match="making the communicator did not") as caught:
            Sharing(world[0]._group, deadline_after(0.05)).agree(world[0]._assembly.journal)
        assert not isinstance(caught.value.waiting_for, str)
        assert [peer.rank for peer in caught.value.waiting_for] == [1]
        assert "has not made the same init, split or group" in str(caught.value)


def test_ranks_of_one_host_share_memory_and_all_say_so() -> None:
    with ranks_over("shm", 3) as world:
        assert {comm._assembly.arena is not None for comm in world} == {True}
        assert on_every(world, lambda comm: comm.all_reduce(1, algorithm="shared_memory")) == [3] * 3


def _refused(*_: Any) -> Any:
    raise OSError(28, "no space left")


@pytest.mark.parametrize("fault", ["create_memory", "open_memory"])
def test_where_one_of_them_cannot_none_does_and_the_links_serve(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, fault, _refused)
    with ranks_over("shm", 3) as world:
        assert {comm._assembly.arena for comm in world} == {None}
        assert on_every(world, lambda comm: comm.all_reduce(1)) == [3] * 3
