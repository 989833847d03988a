import numpy as np
import pytest

from nexar.types import MAX_NODE, AwaitedPeer, describe_peer, format_node, format_seconds, parse_node, whole


@pytest.mark.parametrize("node", [0, 1, 42, MAX_NODE])
def test_a_node_id_survives_its_text(node):
    assert parse_node(format_node(node)) == node


@pytest.mark.parametrize("text", ["", "2a", "0" * 15, "0" * 17, "000000000000002A", "00000000000000_1", "+" + "0" * 15])
def test_text_that_is_no_node_id_is_refused(text):
    with pytest.raises(ValueError, match="16 lower-case hexadecimal digits"):
        parse_node(text)


@pytest.mark.parametrize("node", [-1, MAX_NODE + 1])
def test_a_number_outside_64_bits_is_no_node_id(node):
    with pytest.raises(ValueError, match="outside"):
        format_node(node)


def test_a_peer_is_named_by_what_is_known_of_it():
    assert describe_peer(3) == "rank 3"
    assert describe_peer(3, 42, "10.0.0.7:4000") == "rank 3 (node 000000000000002a at 10.0.0.7:4000)"
    assert describe_peer(0, None, "10.0.0.7:4000") == "rank 0 (at 10.0.0.7:4000)"
    assert describe_peer(None, 42) == "node 000000000000002a"
    assert describe_peer(None, 42, "h:1") == "node 000000000000002a at h:1"
    assert describe_peer(None, None, "h:1") == "a peer at h:1"
    assert describe_peer(None) == "an unknown peer"


def test_an_awaited_peer_shows_its_last_message():
    peer = AwaitedPeer(rank=1, missing="a receive with tag 7", last_heard=0.25, last_operation="all_reduce #41")
    assert str(peer) == "rank 1, missing a receive with tag 7, last heard 250 ms ago, last finished all_reduce #41"


def test_a_receive_from_anybody_waits_for_any_rank():
    assert str(AwaitedPeer(missing="a send with tag 7")) == "any rank, missing a send with tag 7"


@pytest.mark.parametrize(
    ("seconds", "text"), [(30, "30 s"), (2.5, "2.5 s"), (0.04, "40 ms"), (0.0005, "0.5 ms"), (0, "0 s"), (61, "61 s")]
)
def test_durations_read_as_people_write_them(seconds, text):
    assert format_seconds(seconds) == text


def test_a_whole_number_is_one_whoever_made_it():
    assert [whole(number) for number in (3, np.int64(3), np.uint8(3), np.array(3))] == [3] * 4
    assert all(type(whole(number)) is int for number in (3, np.int64(3)))


@pytest.mark.parametrize("number", [3.0, "3", None, np.float32(3), [3]])
def test_what_is_no_whole_number_is_none(number):
    assert whole(number) is None
