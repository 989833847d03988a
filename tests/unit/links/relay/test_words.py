"""What a node says to others: how it looks on the wire, and that a silent neighbour does not make it pile up."""

from nexar.links.relay.hop import WORDS_BYTES
from nexar.links.relay.ways import Ways
from nexar.links.relay.words import Words
from nexar.wire.relay import RelayKind, decode_node, decode_relay
from tests.unit.links.relay.small_world import SmallWorld


def speaker() -> tuple[SmallWorld, Ways, Words]:
    world = SmallWorld(4)
    ways = Ways(world.nodes[0])  # type: ignore[arg-type]
    return world, ways, Words(world.nodes[0], ways)  # type: ignore[arg-type]


def said(ways: Ways) -> bytes:
    step = ways.next()
    assert step is not None
    return b"".join(step.parts)


def test_a_break_is_told_along_the_way_back_with_the_node_beyond_it() -> None:
    _, ways, words = speaker()
    words.tell_broken((0, 1, 2), 3)
    header, body = decode_relay(said(ways))
    assert (header.kind, header.hops, header.route) == (RelayKind.BROKEN, 1, (0, 1, 2))
    assert decode_node(body) == 3


def test_that_a_link_is_over_is_told_with_the_reason_within_a_bound() -> None:
    _, ways, words = speaker()
    words.tell_over(7, (0, 1, 2), "because " * 1000)
    header, body = decode_relay(said(ways))
    assert (header.kind, header.number) == (RelayKind.RESET, 7)
    assert len(body) == 1000


def test_a_word_to_the_peer_of_a_carrier_says_what_has_arrived_and_takes_its_route_or_another() -> None:
    world, ways, words = speaker()
    carrier = world.nodes[0].make(2, number=5)
    words.say(carrier, RelayKind.PROBE, sequence=4)
    words.say(carrier, RelayKind.ACK, route=(0, 3, 2))
    first, second = (decode_relay(said(ways))[0] for _ in range(2))
    assert (first.kind, first.number, first.sequence, first.ack, first.route) == (RelayKind.PROBE, 5, 4, 0, (0, 1, 2))
    assert second.route == (0, 3, 2)


def test_where_there_is_no_way_nothing_is_said() -> None:
    _, ways, words = speaker()
    words.tell_broken((0, 9, 2), 3)
    assert ways.next() is None


def test_for_a_neighbour_that_gives_no_room_a_few_words_wait_and_no_more() -> None:
    _, ways, words = speaker()
    words.tell_broken((0, 1, 2), 3)
    hop = ways.get(1)
    assert hop is not None
    hop.sent(1, 10 * WORDS_BYTES)
    for _ in range(20_000):
        words.tell_broken((0, 1, 2), 3)
    assert 1000 < hop.waits < 10_000
    ways.forget(1)
    assert hop.takes_words
