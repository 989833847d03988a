from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nexar.cluster.membership import Member, Membership
from nexar.communicator.split import chosen, members_of, part_of, propose
from nexar.errors import UsageError
from nexar.group import Group


def group(rank: int, *, communicator: int = 0, size: int = 4) -> Group:
    def check(wanted: Any) -> int:
        if not isinstance(wanted, int) or not 0 <= wanted < size:
            raise UsageError(f"no rank {wanted}")
        return wanted

    facts = {"rank": rank, "communicator": communicator, "matching": SimpleNamespace(generation=1), "check": check}
    return cast(Group, SimpleNamespace(**facts))


PROPOSALS = [(7, 0), (7, -1), (3, 0), (-1, 5)]


def test_ranks_of_one_colour_are_ordered_by_key_then_by_rank() -> None:
    parts = [part_of(group(rank), PROPOSALS, 5) for rank in range(4)]
    assert [each and each.ranks for each in parts] == [(1, 0), (1, 0), (2,), None]
    assert parts[0] == parts[1]


def test_another_occasion_parent_or_set_of_members_has_another_id() -> None:
    ids = {
        part_of(group(0), PROPOSALS, 5).communicator,  # type: ignore[union-attr]
        part_of(group(0), PROPOSALS, 6).communicator,  # type: ignore[union-attr]
        part_of(group(0, communicator=9), PROPOSALS, 5).communicator,  # type: ignore[union-attr]
        part_of(group(2), PROPOSALS, 5).communicator,  # type: ignore[union-attr]
        chosen(group(0), [1, 0], Counter()).communicator,  # type: ignore[union-attr]
    }
    assert len(ids) == 5
    assert all(0 < each < 1 << 63 for each in ids)


def test_a_group_is_counted_by_its_list_so_that_each_has_an_id_of_its_own() -> None:
    mine: Counter[tuple[int, ...]] = Counter()
    theirs: Counter[tuple[int, ...]] = Counter()
    first, second = chosen(group(0), [2, 0], mine), chosen(group(0), [2, 0], mine)
    assert first != second
    assert first == chosen(group(2), [2, 0], theirs)
    assert chosen(group(1), [2, 0], Counter()) is None
    for nonsense in ([], [0, 0], [9]):
        with pytest.raises(UsageError):
            chosen(group(0), nonsense, mine)


def test_members_keep_their_identities_in_the_new_order() -> None:
    members = tuple(Member(each, "host", bytes(32), {}) for each in range(10, 14))
    made = members_of(Membership("test", 3, members), [2, 0])
    assert [each.node for each in made.members] == [12, 10]
    assert (made.cluster, made.epoch) == ("test", 3)


@pytest.mark.parametrize(("color", "key"), [("red", 0), (-2, 0), (0, 1.5), (1 << 70, 0), (0, 1 << 70), (-1, 0)])
def test_colours_and_keys_are_whole_numbers_and_nothing_is_sent_if_not(color: Any, key: Any) -> None:
    with pytest.raises(UsageError, match="split"):
        propose(cast(Any, None), color, key)
