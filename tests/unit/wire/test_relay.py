"""What stands in front of a relayed frame."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.wire.frame import FrameError
from nexar.wire.relay import RelayHeader, RelayKind, advance, decode_node, decode_relay, encode_node, encode_relay

WIDE = st.integers(0, 2**64 - 1)


@st.composite
def headers(draw: st.DrawFn) -> RelayHeader:
    route = tuple(draw(st.lists(WIDE, min_size=2, max_size=12, unique=True)))
    hops = draw(st.integers(1, len(route) - 1))
    number = draw(st.integers(0, 2**32 - 1))
    return RelayHeader(draw(st.integers(0, 255)), hops, number, draw(WIDE), draw(WIDE), draw(WIDE), route)


@given(headers(), st.binary(max_size=40))
def test_what_was_encoded_is_decoded(header: RelayHeader, carried: bytes) -> None:
    found, rest = decode_relay(encode_relay(header) + carried)
    assert found == header
    assert bytes(rest) == carried
    assert (found.source, found.destination) == (header.route[0], header.route[-1])
    assert found.is_at_destination == (header.hops == len(header.route) - 1)


@given(st.binary(max_size=100))
def test_bytes_of_anybody_are_refused_or_a_route_without_a_circle(body: bytes) -> None:
    try:
        header, _ = decode_relay(body)
    except FrameError:
        return
    assert len(set(header.route)) == len(header.route) > header.hops >= 1


def test_a_hop_changes_nothing_but_the_hops() -> None:
    header = RelayHeader(RelayKind.FRAME, 1, 2, 3, 4, 5, (10, 11, 12, 13))
    body = bytearray(encode_relay(header) + b"carried")
    advance(body, 2)
    assert decode_relay(body)[0] == header._replace(hops=2)
    assert bytes(decode_relay(body)[1]) == b"carried"


@pytest.mark.parametrize(
    ("route", "hops", "field"),
    [((1,), 0, "route"), ((1, 2), 0, "hops"), ((1, 2), 2, "hops"), ((1, 2, 1), 1, "route")],
)
def test_a_route_that_is_none_is_refused(route: tuple[int, ...], hops: int, field: str) -> None:
    with pytest.raises(FrameError) as refused:
        decode_relay(encode_relay(RelayHeader(1, hops, 0, 0, 0, 0, route)))
    assert refused.value.field == field


def test_a_route_that_the_body_does_not_hold_is_refused_before_it_is_read() -> None:
    whole = encode_relay(RelayHeader(1, 1, 0, 0, 0, 0, (1, 2, 3)))
    with pytest.raises(FrameError, match="route"):
        decode_relay(whole[:-1])
    with pytest.raises(FrameError, match="body"):
        decode_relay(whole[:10])


def test_a_node_that_cannot_be_reached_is_named() -> None:
    assert decode_node(encode_node(2**63 + 5)) == 2**63 + 5
    with pytest.raises(FrameError):
        decode_node(b"short")
