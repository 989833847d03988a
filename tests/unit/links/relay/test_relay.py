"""A node that is about to close waits for what it has sent, and for what lies with it.

What is relayed arrives, goes round the dead, or is lost with a name: by hand, and under random misfortune.

What a node says to others: how it looks on the wire, and that a silent neighbour does not make it pile up.
"""

import re
import threading
import time
from typing import Any, cast

import pytest

from nexar.links.relay.carrier import WINDOW_BYTES
from nexar.links.relay.forwarding import CLASS_BYTES, NOTICE_BYTES, Neighbours, RefusedSource
from nexar.links.relay.relay import Drain, RelayNotices
from nexar.topology import neighbors
from nexar.wire.frame import Frame, FrameError, FrameKind, Lane
from nexar.wire.relay import RelayHeader, RelayKind, decode_node, decode_relay, encode_relay
from tests.unit.links.relay.small_world import FakeLink, Node, SmallWorld, say


def nobody(_: int) -> bool:
    return False


def drain_of(node: Node, unneeded: int = -1) -> Drain:
    return Drain(node.carriers, node.relay._neighbours, lambda number: number == unneeded)


def test_who_has_sent_nothing_has_nothing_to_wait_for() -> None:
    node = SmallWorld(4).nodes[0]
    node.make(2)
    drain = drain_of(node)
    assert drain.is_ready()
    assert drain.carriers_to_probe() == []


def test_the_peer_is_asked_once_and_again_only_for_more_or_on_another_way() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    say(carrier, b"first")
    drain = drain_of(world.nodes[0])
    assert drain.carriers_to_probe() == [carrier]
    assert not drain.is_ready()
    assert drain.carriers_to_probe() == []
    say(carrier, b"second")
    assert drain.carriers_to_probe() == [carrier]
    world.cut(0, 1)
    assert drain.is_ready()
    assert drain.carriers_to_probe() == [carrier]
    world.settle(carrier)
    assert drain.is_ready()
    assert drain.carriers_to_probe() == []


def test_one_that_is_stranded_is_waited_for_and_not_asked() -> None:
    world = SmallWorld(4)
    world.may_dial = True
    carrier = world.nodes[0].make(2)
    say(carrier, b"first")
    world.cut(0, 1)
    world.cut(0, 3)
    drain = drain_of(world.nodes[0])
    assert drain.carriers_to_probe() == []
    assert not drain.is_ready()
    world.dial(0, 2)
    assert drain.carriers_to_probe() == [carrier]


def test_what_is_for_who_has_left_or_what_has_finished_is_not_waited_for() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    say(carrier, b"first")
    assert drain_of(world.nodes[0], unneeded=2).is_ready()
    assert drain_of(world.nodes[0], unneeded=2).carriers_to_probe() == []
    carrier.finish()
    assert drain_of(world.nodes[0]).carriers_to_probe() == []


def test_what_lies_here_for_others_is_waited_for() -> None:
    world = SmallWorld(6)
    carrier = world.nodes[0].make(3)
    for _ in range(3):
        say(carrier, bytes(CLASS_BYTES // 2 + 1))  # more than rank 2 takes before it has passed something on
    for here, there in ((0, 1), (1, 0), (0, 1)):  # there, the room for it back, and the rest
        while world.wires[here, there]:
            frame, body = world.wires[here, there].popleft()
            link: Any = world.nodes[there].links[here]
            world.nodes[there].relay.take(link, frame, memoryview(body))
    drain = drain_of(world.nodes[1])
    waits = not drain.is_ready()
    world.run()
    assert waits
    assert drain.is_ready()


def test_a_relay_settles_when_all_has_arrived_and_not_before_it() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    say(carrier, b"first")
    own_relay = world.nodes[0].relay
    own_relay.settle(time.monotonic(), nobody)  # that was the deadline
    assert carrier.outgoing.unacked
    waiting = threading.Thread(target=own_relay.settle, args=(time.monotonic() + 60, nobody))
    waiting.start()
    while waiting.is_alive():
        world.run()
        waiting.join(0.001)
    assert not carrier.outgoing.unacked
    assert world.nodes[2].ears[0].frames == [b"first"]


def test_a_relay_does_not_wait_for_who_is_lost() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    say(carrier, b"first")
    own_relay = world.nodes[0].relay
    waiting = threading.Thread(target=own_relay.settle, args=(time.monotonic() + 60, nobody))
    waiting.start()
    carrier.abort("it is gone")
    waiting.join(30)
    assert not waiting.is_alive()


MESSAGES = [b"%d" % number for number in range(50)]


def arrive(world: SmallWorld, at: int, before: int, header: RelayHeader, carried: bytes = b"") -> None:
    body = encode_relay(header) + carried
    link = cast(Any, world.nodes[at].links[before])
    world.nodes[at].relay.take(link, Frame(kind=int(FrameKind.RELAY), body=len(body)), memoryview(body))


def test_frames_go_from_hop_to_hop_and_arrive_in_order() -> None:
    world = SmallWorld(6)
    carrier = world.nodes[0].make(3)
    for message in MESSAGES:
        say(carrier, message)
    world.settle(carrier)
    assert world.nodes[3].ears[0].frames == MESSAGES
    assert [world.nodes[number].relay.forwarded >= 50 for number in (1, 2, 4, 5)] == [True, True, False, False]


def test_urgent_frames_leave_before_others_that_wait() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    for _ in range(4):
        say(carrier, bytes(WINDOW_BYTES // 2))
    say(carrier, b"urgent", Lane.CONTROL)
    world.settle(carrier)
    frames = world.nodes[2].ears[0].frames
    assert frames.index(b"urgent") < 4


def test_what_is_not_this_node_s_place_in_the_route_breaks_the_protocol() -> None:
    world = SmallWorld(6)
    for route, hops in (((0, 2, 3), 1), ((5, 1, 2), 1), ((0, 1, 2), 2)):
        with pytest.raises(FrameError, match="position of this node"):
            arrive(world, 1, 0, RelayHeader(RelayKind.FRAME, hops, 1, 1, 0, 0, route))


def test_a_route_that_is_too_long_is_not_followed_and_its_source_is_notified() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    endless = (0, 1, 2, *range(100, 200))
    arrive(world, 1, 0, RelayHeader(RelayKind.FRAME, 1, 1, 1, 0, 0, endless))
    assert world.nodes[1].relay.refused == 1
    assert world.nodes[1].relay.forwarded == 0
    world.run()
    assert carrier.avoid  # informed that rank 1 did not pass it on to rank 2


def test_a_hop_that_is_gone_is_gone_round() -> None:
    world = SmallWorld(6)
    carrier = world.nodes[0].make(3)
    for message in MESSAGES[:25]:
        say(carrier, message)
    for _ in range(20):
        world.step()
    world.cut(1, 2)
    for message in MESSAGES[25:]:
        say(carrier, message)
    world.settle(carrier)
    assert world.nodes[3].ears[0].frames == MESSAGES
    assert carrier.route == (0, 5, 4, 3)


def test_without_a_way_it_is_lost_and_the_hop_is_named() -> None:
    world = SmallWorld(6)
    carrier = world.nodes[0].make(3)
    say(carrier, b"there")
    world.settle(carrier)
    world.cut(1, 2)
    world.cut(4, 5)
    say(carrier, b"nowhere")
    world.settle(carrier)
    (lost,) = world.nodes[0].ears[3].lost
    assert lost.kind == "peer"
    assert re.search(r"no route over other nodes is left: node 0+[15] cannot reach 0+[24]", lost.reason)


def test_after_a_change_routes_are_looked_for_anew_and_who_is_no_member_is_lost() -> None:
    world = SmallWorld(6)
    stays, goes = world.nodes[0].make(2), world.nodes[0].make(3)
    for carrier in (stays, goes):
        say(carrier, b"before")
    world.settle(stays, goes)
    world.cut(0, 1)
    assert stays.avoid == {1}
    world.nodes[0].relay.adopt(lambda node: node != 3)
    say(stays, b"after")
    world.settle(stays)
    assert (stays.avoid, stays.error) == (frozenset(), None)
    assert world.nodes[2].ears[0].frames == [b"before", b"after"]
    assert [each.reason for each in world.nodes[0].ears[3].lost] == ["it is no longer a member"]


def test_a_closed_relay_ends_its_carriers_without_a_message() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    say(carrier, b"x")
    world.settle(carrier)
    world.nodes[0].relay.close()
    assert carrier.error is not None
    assert world.nodes[0].ears[2].lost == []


def test_who_wants_no_such_link_says_so_and_it_is_lost_at_its_source() -> None:
    world = SmallWorld(4)
    world.nodes[2].refusal = "this node is closed"
    carrier = world.nodes[0].make(2)
    say(carrier, b"anybody there?")
    world.run()
    assert [str(each) for each in world.nodes[0].ears[2].lost] == ["this node is closed [peer]"]


def test_a_number_of_before_gets_no_carrier_and_messages_of_nobody_are_dropped() -> None:
    world = SmallWorld(4)
    for kind in (RelayKind.ACK, RelayKind.RESET, RelayKind.BROKEN):
        arrive(world, 2, 1, RelayHeader(kind, 2, 9, 1, 0, 0, (0, 1, 2)), b"12345678")
    assert world.nodes[2].carriers == {}


def test_a_kind_that_nobody_knows_is_dropped_and_makes_no_link() -> None:
    world = SmallWorld(4)
    arrive(world, 2, 1, RelayHeader(77, 2, 1, 1, 0, 0, (0, 1, 2)))
    assert world.nodes[2].carriers == {}
    assert world.nodes[2].relay.dropped == 1


def test_a_break_that_names_no_node_is_dropped_and_nobody_is_blamed() -> None:
    world = SmallWorld(4)
    arrive(world, 2, 1, RelayHeader(RelayKind.BROKEN, 2, 0, 1, 0, 0, (0, 1, 2)), b"123")
    assert world.nodes[2].relay.dropped == 1


def test_what_cannot_be_taken_yet_is_taken_when_its_source_is_out_of_reach_or_the_members_change() -> None:
    for event in ("lost", "unreachable", "adopt"):
        world = SmallWorld(4)
        node, carrier = world.nodes[2], world.nodes[0].make(2)
        node.unwelcome = RefusedSource.NOT_YET
        say(carrier, b"believe me")
        world.run()
        assert 0 not in node.ears
        assert node.looked_into == [0]
        node.unwelcome = None
        node.relay.unreachable(3, "another one")
        if event == "lost":
            node.relay.lost(cast(Any, FakeLink(world, 2, 0)))
        elif event == "unreachable":
            node.relay.unreachable(0, "no answer")
        else:
            node.relay.adopt(lambda _: True)
        world.run()
        assert node.ears[0].frames == [b"believe me"]


def test_what_can_be_taken_by_the_time_it_is_held_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SmallWorld(4)
    node, carrier = world.nodes[2], world.nodes[0].make(2)
    node.unwelcome = RefusedSource.NOT_YET

    def investigate(_: RelayHeader) -> bool:
        node.unwelcome = None
        return True

    monkeypatch.setattr(node, "investigate", investigate)
    say(carrier, b"believe me")
    world.run()
    assert node.ears[0].frames == [b"believe me"]


def test_who_is_connected_and_relayed_over_others_is_shown_the_way_and_takes_it() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    say(carrier, b"over rank 1")
    world.dial(0, 2)
    world.nodes[2].unwelcome = RefusedSource.NOT_YET
    while not world.nodes[2].relay.in_use:
        world.step()
    world.nodes[2].unwelcome = None
    world.run()
    assert carrier.route == (0, 2)
    assert world.nodes[2].ears[0].frames == [b"over rank 1"]


def test_who_was_relayed_over_others_before_is_shown_the_way_when_there_is_one() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    say(carrier, b"over rank 1")
    world.nodes[2].unwelcome = RefusedSource.NOT_YET
    world.run()
    world.dial(0, 2)
    world.nodes[2].tasks.popleft()()
    world.nodes[2].unwelcome = None
    world.run()
    assert carrier.route == (0, 2)
    assert world.nodes[2].ears[0].frames == [b"over rank 1"]


def test_what_will_never_be_taken_is_dropped() -> None:
    world = SmallWorld(4)
    world.nodes[2].unwelcome = RefusedSource.NEVER
    say(world.nodes[0].make(2), b"a stranger")
    world.run()
    assert world.nodes[2].relay.dropped == 1
    assert not world.nodes[2].relay.in_use


def test_who_has_a_connection_of_its_own_to_the_peer_asks_over_that() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    say(carrier, b"over rank 1")
    world.wires[0, 1].clear()
    world.dial(0, 2)
    world.nodes[0].relay.tick(1e9)
    world.nodes[0].relay.flush()  # as its driver does
    ((frame, body),) = world.wires[0, 2]
    header, _ = decode_relay(body)
    assert (frame.kind, header.kind, header.route) == (FrameKind.RELAY, RelayKind.PROBE, (0, 2))
    world.settle(carrier)
    assert world.nodes[2].ears[0].frames == [b"over rank 1"]


def test_both_ends_finish_and_nothing_is_left() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    say(carrier, b"last word")
    carrier.finish()
    world.run()
    other = world.nodes[2].carriers[0]
    assert world.nodes[2].ears[0].frames == [b"last word"]
    assert world.nodes[2].ears[0].finished == 1
    other.finish()
    world.run()
    assert world.nodes[0].ears[2].finished == 1
    assert not world.nodes[0].relay.in_use
    assert str(carrier.error) == str(other.error) == "both sides have finished [closed]"


def test_who_aborts_is_reported_at_the_other_end() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    say(carrier, b"x")
    world.run()
    carrier.abort("I am leaving")
    world.run()
    assert [each.reason for each in world.nodes[2].ears[0].lost] == ["I am leaving"]
    assert world.nodes[0].ears[2].lost == []


def test_payloads_land_where_they_are_expected() -> None:
    world = SmallWorld(6)
    carrier = world.nodes[0].make(3)
    say(carrier, b"begin")
    world.run()
    into = bytearray(WINDOW_BYTES * 3)
    world.nodes[3].carriers[0].expect_payload(5, memoryview(into))
    data = world.chance.randbytes(len(into))
    carrier.send_payload(5, memoryview(data))
    world.nodes[0].relay.flush()
    world.settle(carrier)
    assert world.nodes[3].ears[0].payloads == [5]
    assert into == data


@pytest.mark.parametrize("topology", ["k_regular:2", "k_regular:4", "hypercube"])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_cut_everything_arrives_once_and_in_order_or_the_carrier_is_lost(topology: str, seed: int) -> None:
    world = SmallWorld(9, topology, seed)
    chance = world.chance
    far = {one: set(range(one + 1, 9)) - set(neighbors(topology, 9, one)) for one in range(9)}
    pairs = [(one, other) for one, others in far.items() for other in sorted(others)]
    talks = {(one, other): world.nodes[one].make(other) for one, other in chance.sample(pairs, 5)}
    edges = [edge for edge in world.wires if edge[0] < edge[1]]
    cuts = chance.sample(edges, 3)
    said: dict[tuple[int, int], list[bytes]] = {pair: [] for pair in talks}
    for number in range(400):
        pair, carrier = chance.choice(list(talks.items()))
        if carrier.error is None:
            message = b"%d" % number + bytes(chance.choice((0, 100, 20_000)))
            said[pair].append(message)
            say(carrier, message)
        for _ in range(chance.randrange(8)):
            world.step()
        if number % 100 == 50 and cuts:
            world.cut(*cuts.pop())
    world.settle(*talks.values())
    for (one, other), carrier in talks.items():
        received = world.nodes[other].ears[one].frames if one in world.nodes[other].ears else []
        assert received == said[one, other][: len(received)]
        if carrier.error is None:
            assert received == said[one, other]


def test_a_relayed_frame_that_raises_costs_its_source_the_connection_and_its_bearer_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    world = SmallWorld(4)
    carrier = world.nodes[2].make(0)
    own_relay = world.nodes[2].relay
    monkeypatch.setattr(own_relay, "_handle_frame", broken)
    with caplog.at_level("CRITICAL"):
        arrive(world, 2, 1, RelayHeader(RelayKind.FRAME, 2, 1, 1, 0, 0, (0, 1, 2)), b"x")
    assert own_relay.dropped == 1
    assert carrier.error is not None
    assert carrier.error.misbehaved


def speaker() -> tuple[SmallWorld, Neighbours, RelayNotices]:
    world = SmallWorld(4)
    ways = Neighbours(world.nodes[0])  # type: ignore[arg-type]
    return world, ways, RelayNotices(world.nodes[0], ways)  # type: ignore[arg-type]


def said(ways: Neighbours) -> bytes:
    step = ways.next()
    assert step is not None
    return b"".join(step.parts)


def test_a_break_is_reported_along_the_way_back_with_the_node_beyond_it() -> None:
    _, ways, messages = speaker()
    messages.send_broken((0, 1, 2), 3)
    header, body = decode_relay(said(ways))
    assert (header.kind, header.hops, header.route) == (RelayKind.BROKEN, 1, (0, 1, 2))
    assert decode_node(body) == 3


def test_that_a_link_is_over_is_reported_with_the_reason_within_a_bound() -> None:
    _, ways, messages = speaker()
    messages.send_reset(7, (0, 1, 2), "because " * 1000)
    header, body = decode_relay(said(ways))
    assert (header.kind, header.number) == (RelayKind.RESET, 7)
    assert len(body) == 1000


def test_a_message_to_the_peer_of_a_carrier_says_what_has_arrived_and_takes_its_route_or_another() -> None:
    world, ways, messages = speaker()
    carrier = world.nodes[0].make(2, number=5)
    messages.send(carrier, RelayKind.PROBE, sequence=4)
    messages.send(carrier, RelayKind.ACK, route=(0, 3, 2))
    first, second = (decode_relay(said(ways))[0] for _ in range(2))
    assert (first.kind, first.number, first.sequence, first.ack, first.route) == (RelayKind.PROBE, 5, 4, 0, (0, 1, 2))
    assert second.route == (0, 3, 2)


def test_where_there_is_no_way_nothing_is_said() -> None:
    _, ways, messages = speaker()
    messages.send_broken((0, 9, 2), 3)
    assert ways.next() is None


def test_for_a_neighbour_that_gives_no_room_a_few_messages_wait_and_no_more() -> None:
    _, ways, messages = speaker()
    messages.send_broken((0, 1, 2), 3)
    hop = ways.get(1)
    assert hop is not None
    hop.sent(1, 10 * NOTICE_BYTES)
    for _ in range(20_000):
        messages.send_broken((0, 1, 2), 3)
    assert 1000 < hop.waits < 10_000
    ways.forget(1)
    assert hop.accepts_notices
