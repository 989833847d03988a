"""All members come to the same answer about who comes and who goes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.cluster.decisions.resize import Resize, ResizeRequest, decode_resize_request, encode_resize_request, resize
from nexar.cluster.membership import Departure
from tests.unit.cluster.decisions.voters import a_member, a_membership

NO_LIMIT = 0


def requests(size: int, **by_rank: ResizeRequest) -> list[ResizeRequest]:
    """`r2=ResizeRequest(…)`: that of rank 2; the others have none."""
    return [by_rank.get(f"r{rank}", ResizeRequest()) for rank in range(size)]


def waiting(*nodes: int) -> ResizeRequest:
    return ResizeRequest(waiting=tuple(a_member(node) for node in nodes))


def resized(size: int, least: int = 1, most: int = NO_LIMIT, **by_rank: ResizeRequest) -> tuple[list[int], list[int]]:
    """Nodes that come, and nodes that go; rank r is node r + 1."""
    found = resize(a_membership(size), requests(size, **by_rank), least=least, most=most)
    return [member.node for member in found.joined], [departure.node for departure in found.left]


def test_without_a_request_nothing_happens() -> None:
    assert resized(3) == ([], [])


def test_who_waits_comes_in_though_only_one_rank_knows_of_it() -> None:
    assert resized(3, r2=waiting(9)) == ([9], [])


def test_the_order_is_that_of_the_lowest_rank_that_knows() -> None:
    assert resized(3, r0=waiting(9, 8), r1=waiting(7, 8, 9)) == ([9, 8, 7], [])


def test_who_is_a_member_already_does_not_come_in_again() -> None:
    assert resized(3, r0=waiting(2, 9)) == ([9], [])


def test_no_more_come_in_than_there_is_room_for() -> None:
    assert resized(3, most=4, r0=waiting(9, 8)) == ([9], [])
    assert resized(4, most=4, r0=waiting(9, 8)) == ([], [])
    assert resized(5, most=4, r0=waiting(9)) == ([], [])  # the limit was lowered


def test_who_leaves_makes_room() -> None:
    assert resized(3, most=3, r0=waiting(9), r1=ResizeRequest(leaving=True)) == ([9], [2])


def test_who_has_to_stay_makes_no_room() -> None:
    assert resized(1, most=1, r0=ResizeRequest((a_member(9),), leaving=True)) == ([], [])


def test_the_minimum_is_kept_and_joiners_count_for_it() -> None:
    both = {"r0": ResizeRequest(leaving=True), "r2": ResizeRequest(leaving=True)}
    assert resized(3, least=2, **both) == ([], [1])
    assert resized(3, least=3, **both) == ([], [])
    assert resized(3, least=3, r0=ResizeRequest((a_member(9),), leaving=True), r2=ResizeRequest(leaving=True)) == (
        [9],
        [1],
    )


def test_somebody_stays() -> None:
    everybody = {f"r{rank}": ResizeRequest(leaving=True) for rank in range(3)}
    assert resized(3, **everybody) == ([], [1, 2])
    assert resized(1, r0=ResizeRequest((a_member(9),), leaving=True)) == ([9], [])


def test_causes_say_who_wanted_it() -> None:
    asking = ResizeRequest(removals={2: "too slow", 3: "", 77: "not here"})
    found = resize(a_membership(4), requests(4, r0=asking, r2=ResizeRequest(leaving=True)), least=1, most=NO_LIMIT)
    assert found.left == (
        Departure(2, "rank 0 asked it to leave: too slow", willing=True),
        Departure(3, "it wanted to leave", willing=True),
    )
    found = resize(a_membership(2), requests(2, r1=ResizeRequest(removals={1: ""})), least=1, most=NO_LIMIT)
    assert found.left == (Departure(1, "rank 1 asked it to leave", willing=True),)


any_request = st.builds(
    ResizeRequest,
    waiting=st.lists(st.integers(1, 30).map(a_member), max_size=6).map(tuple),
    leaving=st.booleans(),
    removals=st.dictionaries(st.integers(1, 30), st.text(max_size=20), max_size=4),
    complaint=st.text(max_size=20),
)


@given(st.lists(any_request, min_size=1, max_size=8), st.integers(1, 10), st.none() | st.integers(0, 6))
def test_the_laws_hold_whatever_is_wished(notified: list[ResizeRequest], least: int, beyond: int | None) -> None:
    most = NO_LIMIT if beyond is None else least + beyond
    membership = a_membership(len(notified))
    found: Resize = resize(membership, notified, least=least, most=most)
    joined, left = [member.node for member in found.joined], [departure.node for departure in found.left]
    size = membership.size + len(joined) - len(left)
    assert len(set(joined)) == len(joined)
    assert all(membership.rank_of(node) is None for node in joined)
    assert all(membership.rank_of(node) is not None for node in left)
    assert left == sorted(left)
    assert len(left) < membership.size
    assert not left or size >= least
    assert not joined or most == NO_LIMIT or size <= most


@given(any_request)
def test_decoding_undoes_encoding(request: ResizeRequest) -> None:
    assert decode_resize_request(encode_resize_request(request)) == request


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x94", encode_resize_request(ResizeRequest())[:-1], b"\x91\xa3abc"])
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a resize request"):
        decode_resize_request(data)
