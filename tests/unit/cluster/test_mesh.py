"""Links between members, on memory and in all weathers.

Links of members that are none any more, or of nodes that are about to close.

Links opened for the first communicator: all of a small world, those for watching of a large one.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from nexar.cluster import mesh
from nexar.cluster.control_channel import MeshEvent, RemovalReported
from nexar.cluster.decisions.failure_detector import watched, watchers
from nexar.cluster.dialing import Dialer
from nexar.cluster.membership import Change, Departure, Membership
from nexar.cluster.mesh import EAGER_WORLD, Mesh, open_all, open_first, open_watching
from nexar.errors import PeerLost, UsageError
from nexar.links.link import Link
from nexar.testing.faults import DoubleDial, LinkCut, LinkDelay, LinkStall, RefuseDial, SilentDial
from nexar.transport.base import Carrier, Expected
from nexar.wire.control import Introduce
from nexar.wire.frame import Space
from tests.ranks import EVENT_TIMEOUT, on_every
from tests.unit.cluster.memory_mesh import Meshes, eventually, member_of, soon

LOW, HIGH = 0, 1
SHORT = 0.5  # seconds of a dial that is meant to fail; a dial that is meant to succeed must fit in on a busy machine


@pytest.fixture
def pair() -> Iterator[Meshes]:
    made = Meshes(2)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexar.cluster.mesh._HEAD_START", 0.1)


def both(pair: Meshes, timeout: float = EVENT_TIMEOUT) -> None:
    """Each opens its link to the other."""
    links = on_every([LOW, HIGH], lambda rank: pair.link(rank, 1 - rank, timeout))
    assert links == [pair.linked_to(LOW, HIGH), pair.linked_to(HIGH, LOW)]
    eventually(lambda: pair.linked(LOW, HIGH), "one link")


# ---------------------------------------------------------------- one dials


@pytest.mark.parametrize("rank", [LOW, HIGH])
def test_a_link_is_opened_when_it_is_first_wanted_and_stays(pair: Meshes, rank: int) -> None:
    assert pair.meshes[rank].links() == {}
    link = pair.link(rank, 1 - rank)
    assert pair.link(rank, 1 - rank) is link
    eventually(lambda: pair.linked(LOW, HIGH), "a link at both ends")
    assert pair.link(1 - rank, rank).peer == pair.nodes[rank].id


def test_many_threads_that_want_it_at_once_get_one_link(pair: Meshes) -> None:
    links = on_every([LOW] * 8, lambda rank: pair.link(rank, HIGH))
    assert len(set(map(id, links))) == 1
    assert pair.linked(LOW, HIGH) or eventually(lambda: pair.linked(LOW, HIGH), "a link") is None


def test_a_dial_that_is_reported_twice_makes_one_link(pair: Meshes) -> None:
    pair.faults.add(DoubleDial())
    both(pair)


@pytest.mark.parametrize("rank", [LOW, HIGH])
def test_a_peer_that_cannot_be_reached_is_given_up_as_soon_by_the_higher_node_as_by_the_lower(
    pair: Meshes, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The higher node waits longer for an answer, which the other may hold back, but not longer for a connection."""
    meter, given = pair.nodes[rank].delay_meter, list[float]()

    def silent(self: Dialer, addresses: object, expected: object, deadline: float, cancel_token: object) -> Carrier:
        given.append(deadline - time.monotonic() - meter.seconds)
        raise TimeoutError("no answer in time")

    monkeypatch.setattr(Dialer, "dial", silent)
    with pytest.raises(PeerLost, match="no answer in time"):
        pair.link(rank, 1 - rank, timeout=100.0)
    assert given[0] < 15.0  # 10 s; what the meter says may have changed by a little since


def test_peers_that_are_not_connected_are_reported_with_the_reason(pair: Meshes) -> None:
    assert pair.meshes[LOW].unconnected() == []  # nobody has asked for a link
    for way in [(LOW, HIGH), (HIGH, LOW)]:
        pair.faults.add(pair.on_way(RefuseDial, *way))
    with pytest.raises(PeerLost):
        pair.link(LOW, HIGH)
    (found,) = pair.meshes[LOW].unconnected()
    assert (found.rank, found.address) == (HIGH, pair.membership.members[HIGH].addresses["memory"][0])
    assert found.cause.startswith("cannot connect: ")


def test_a_peer_that_is_connected_is_not_among_those_that_are_not(pair: Meshes) -> None:
    both(pair)
    assert pair.meshes[LOW].unconnected() == []


def test_many_threads_that_want_an_impossible_link_learn_why_after_one_dial(
    pair: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexar.cluster.mesh._LONGEST_DIAL", 0.3)
    pair.faults.add(SilentDial())
    begin = threading.Barrier(4)

    def fails(rank: int) -> str:
        begin.wait(EVENT_TIMEOUT)
        with pytest.raises(PeerLost) as raised:
            pair.link(rank, HIGH)
        return raised.value.cause

    assert len(set(on_every([LOW] * 4, fails))) == 1
    assert pair.meshes[LOW]._peers._peers[pair.nodes[HIGH].id].state.failures == 1


def test_where_nobody_can_be_reached_the_error_says_who_where_and_why(pair: Meshes) -> None:
    pair.faults.add(RefuseDial())
    with pytest.raises(PeerLost, match="the network refuses") as raised:
        pair.link(LOW, HIGH)
    assert (raised.value.rank, raised.value.node) == (HIGH, pair.nodes[HIGH].id)
    assert raised.value.address == pair.nodes[HIGH].addresses()["memory"][0]
    pair.faults.clear()
    both(pair)  # what could not be opened then can be opened now


def test_a_peer_that_never_answers_costs_no_more_than_the_deadline(pair: Meshes) -> None:
    pair.faults.add(pair.on_way(LinkStall, HIGH, LOW))
    with pytest.raises(PeerLost, match="did not answer"):
        pair.link(LOW, HIGH, SHORT)


def test_a_connection_that_breaks_at_once_is_a_failure_at_once(pair: Meshes) -> None:
    """Before the first message, or behind it: as it happens."""
    pair.faults.add(pair.on_way(LinkCut, LOW, HIGH))
    with pytest.raises(PeerLost, match=r"(cannot connect|the connection broke at once): the connection was cut"):
        pair.link(LOW, HIGH)


# ---------------------------------------------------------------- both dial


def test_two_that_dial_each_other_again_and_again_keep_one_connection() -> None:
    for _ in range(20):
        pair = Meshes(2)
        try:
            both(pair)
        finally:
            pair.close()


@pytest.mark.parametrize("slow", [LOW, HIGH])
def test_two_that_dial_each_other_while_one_way_is_slow_keep_one_connection(pair: Meshes, slow: int) -> None:
    pair.faults.add(LinkDelay(0.05, source=pair.nodes[slow].id))
    both(pair)


@pytest.mark.parametrize("blocked", [LOW, HIGH])
@pytest.mark.parametrize("fault", [RefuseDial, SilentDial])
def test_where_one_direction_is_blocked_the_other_is_used(
    pair: Meshes, blocked: int, fault: Callable[..., RefuseDial | SilentDial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexar.cluster.mesh._LONGEST_DIAL", SHORT)
    pair.faults.add(pair.on_way(fault, blocked, 1 - blocked))
    on_every(pair.meshes, lambda mesh: open_all(mesh, soon()))
    eventually(lambda: pair.linked(LOW, HIGH), "a link")


def test_when_the_lower_ones_dial_fails_while_the_others_waits_that_one_is_used(
    pair: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexar.cluster.mesh._LONGEST_DIAL", 0.3)
    pair.faults.add(pair.on_way(SilentDial, LOW, HIGH))
    both(pair)


def test_who_was_welcomed_and_falls_silent_does_not_stop_the_other_for_good(
    pair: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexar.cluster.mesh._LONGEST_DIAL", SHORT)
    stall = pair.on_way(LinkStall, HIGH, LOW)  # what the higher says does not arrive: its welcome, its introduction
    pair.faults.add(stall)
    with pytest.raises(PeerLost):
        pair.link(LOW, HIGH)
    pair.faults.clear()
    both(pair)


# ---------------------------------------------------------------- who is let in


def test_connections_that_come_before_the_membership_is_known_are_answered_then() -> None:
    pair = Meshes(2, adopt=False)
    try:
        pair.meshes[LOW].adopt(pair.membership)
        timer = threading.Timer(0.05, pair.meshes[HIGH].adopt, (pair.membership,))
        timer.start()
        pair.link(LOW, HIGH)
        timer.join()
        eventually(lambda: pair.linked(LOW, HIGH), "a link")
    finally:
        pair.close()


def test_a_node_that_is_not_in_the_membership_is_refused() -> None:
    world = Meshes(3, adopt=False)
    try:
        without = Membership("ours", 1, world.membership.members[:2])
        for rank in (0, 1):
            world.meshes[rank].adopt(without)
        world.meshes[2].adopt(world.membership)
        with pytest.raises(PeerLost):
            world.link(2, 0)
        eventually(lambda: any("not in the membership" in reason for reason in world.refused), "a refusal")
        assert world.meshes[0].links() == {}
    finally:
        world.close()


def test_who_claims_another_place_is_declined_with_both(pair: Meshes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexar.cluster.decisions.peering.Introduce", lambda **_: Introduce(rank=7, epoch=1))
    with pytest.raises(PeerLost, match="rank 7"):
        pair.link(LOW, HIGH)
    assert "claims rank 7 at epoch 1, the membership gives it rank 0" in pair.refused[0]


def test_who_is_at_another_epoch_is_let_in_all_the_same(pair: Meshes) -> None:
    pair.meshes[HIGH].adopt(Membership("ours", 2, pair.membership.members))
    pair.link(LOW, HIGH)
    eventually(lambda: pair.linked(LOW, HIGH), "a link")


def test_who_answers_from_another_place_is_left(pair: Meshes) -> None:
    members = pair.membership.members
    pair.meshes[LOW].adopt(Membership("ours", 1, (members[0], member_of(pair.nodes[0], node_id=5), members[1])))
    with pytest.raises(PeerLost, match="claims rank 1 at epoch 1, the membership gives it rank 2"):
        pair.link(LOW, HIGH)


def test_before_the_membership_is_known_there_are_no_links() -> None:
    lonely = Meshes(1, adopt=False)
    try:
        for ask in (lambda: lonely.link(0, 0), lambda: open_all(lonely.meshes[0], soon())):
            with pytest.raises(UsageError, match="does not know its membership"):
                ask()
    finally:
        lonely.close()


# ---------------------------------------------------------------- all at once


@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_every_link_of_a_small_world_is_opened_at_once(size: int) -> None:
    world = Meshes(size)
    try:
        on_every(world.meshes, lambda mesh: open_all(mesh, soon()))
        for rank, mesh in enumerate(world.meshes):
            assert sorted(mesh.directory.rank_of(node) for node in mesh.links()) == [
                other for other in range(size) if other != rank
            ]
        assert all(world.linked(one, other) for one in range(size) for other in range(one))
    finally:
        world.close()


def test_a_link_that_cannot_be_opened_is_reported_by_both_ends_and_the_others_are_open() -> None:
    world = Meshes(3)
    try:
        blocked = [world.on_way(RefuseDial, one, other) for one, other in ((1, 2), (2, 1))]
        world.faults.add(*blocked)

        def opens(mesh: Mesh) -> int | None:
            try:
                open_all(mesh, soon())
            except PeerLost as lost:
                return lost.rank
            return None

        assert on_every(world.meshes, opens) == [None, 2, 1]
        assert world.linked(0, 1)
        assert world.linked(0, 2)
    finally:
        world.close()


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("fault", [SilentDial(), LinkStall()], ids=["connecting", "introducing"])
def test_closing_ends_a_dial_that_is_under_way(pair: Meshes, fault: SilentDial | LinkStall) -> None:
    pair.faults.add(fault)
    raised: list[BaseException] = []

    def dial() -> None:
        try:
            pair.link(LOW, HIGH, 600)
        except (UsageError, PeerLost) as error:
            raised.append(error)

    dialing = threading.Thread(target=dial)
    dialing.start()
    eventually(lambda: any(pair.state._dialing for pair in pair.meshes[LOW]._peers.listed()), "a dial")
    pair.meshes[LOW].close()
    dialing.join(EVENT_TIMEOUT)
    assert not dialing.is_alive()
    assert isinstance(raised[0], UsageError)


def test_ctrl_c_ends_a_dial_and_the_next_one_works(pair: Meshes) -> None:
    pair.faults.add(SilentDial())
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pair.link(LOW, HIGH, 600)
    pair.faults.clear()
    both(pair)


def test_a_dial_that_comes_while_the_other_closes_is_refused_and_harms_nobody(pair: Meshes) -> None:
    pair.meshes[HIGH].close()
    with pytest.raises(PeerLost):
        pair.link(LOW, HIGH)
    pair.meshes[HIGH].close()
    with pytest.raises(UsageError, match="closed"):
        pair.link(HIGH, LOW)


def test_closing_notifies_the_others(pair: Meshes) -> None:
    both(pair)
    pair.meshes[LOW].close()
    link: Link = pair.linked_to(HIGH, LOW)
    eventually(lambda: link.failure is not None, "the news")
    assert isinstance(link.failure, PeerLost)


def test_shared_memory_that_comes_while_a_node_closes_costs_nobody_what_was_sent(pair: Meshes) -> None:
    both(pair)
    low, high = (pair.link(rank, 1 - rank) for rank in (LOW, HIGH))
    received = pair.meshes[LOW].router.open(0)
    pair.meshes[HIGH].router.open(0)
    stall = pair.on_way(LinkStall, HIGH, LOW)
    pair.faults.add(stall)
    high.post_send(0, memoryview(b"the last word"))
    closing = threading.Thread(target=pair.meshes[HIGH].close)
    closing.start()
    eventually(lambda: high.failure is not None, "the closing")
    low.adopt(second_carrier(pair))
    pair.faults.remove(stall)
    message = received.post(None, source=pair.nodes[HIGH].id, space=Space.UNTAGGED, tag=0)
    pair.nodes[LOW].progress.wait([message], soon())
    assert bytes(message.into or b"") == b"the last word"
    closing.join()
    assert "it closed the link" in str(low.failure)


def second_carrier(pair: Meshes) -> Carrier:
    """From the lower to the higher, as if through shared memory; the higher mesh has been given it."""
    given = threading.Event()

    class RefusingListener:
        def carrier_accepted(self, carrier: Carrier) -> None:
            carrier.scheme = "shm"
            pair.meshes[HIGH].carrier_accepted(carrier)
            given.set()

        def candidate_refused(self, address: str, reason: str) -> None: ...

    pair.nodes[HIGH].listen(RefusingListener())
    node = pair.nodes[LOW]
    address = pair.nodes[HIGH].addresses()["memory"][0]
    carrier = node._by_scheme["memory"].connect(address, Expected(pair.nodes[HIGH].id), soon())
    carrier.scheme = "shm"
    assert given.wait(EVENT_TIMEOUT)
    return carrier


def test_who_dials_although_its_link_was_lost_is_notified(pair: Meshes) -> None:
    both(pair)
    pair.linked_to(HIGH, LOW).abort("broken")
    eventually(lambda: pair.linked_to(LOW, HIGH).failure is not None, "the loss")
    pair.meshes[HIGH]._peers._peers.clear()  # as if it had never been open there
    with pytest.raises(PeerLost, match="link between us was lost"):
        pair.link(HIGH, LOW)


def test_a_link_that_was_lost_can_be_made_anew_from_either_side(pair: Meshes) -> None:
    both(pair)
    for rank in (LOW, HIGH, HIGH):
        old = pair.linked_to(rank, 1 - rank)
        old.lose("the network was cut")
        fresh = pair.meshes[rank].relink(pair.nodes[1 - rank].id, soon())
        assert fresh is not old
        eventually(lambda: pair.linked(LOW, HIGH), "a link")


def test_a_new_link_shows_a_peer_that_had_not_noticed_that_the_old_one_is_lost(pair: Meshes) -> None:
    both(pair)
    there = pair.linked_to(HIGH, LOW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nexar.transport.memory.carrier.MemoryCarrier.abort", lambda *_: None)
        pair.linked_to(LOW, HIGH).lose("seen on one side only")
    pair.meshes[LOW].relink(pair.nodes[HIGH].id, soon())
    eventually(lambda: pair.linked(LOW, HIGH), "a link")
    assert isinstance(there.failure, PeerLost)


def test_who_is_no_member_any_more_is_notified_when_it_dials(pair: Meshes) -> None:
    reported: list[MeshEvent] = []
    pair.meshes[HIGH].control.connect_events(reported.append)
    change = Change(2, left=(Departure(pair.nodes[HIGH].id, "it was silent"),))
    pair.meshes[LOW].adopt(change.apply(pair.membership), change)
    with pytest.raises(PeerLost, match="went on without this node in epoch 2: it was silent"):
        pair.link(HIGH, LOW)
    assert reported == [RemovalReported(2, "it was silent")]


def test_a_joiner_has_links_before_it_is_a_member() -> None:
    world = Meshes(2, adopt=False)
    try:
        alone = Membership("ours", 1, world.membership.members[:1])
        for mesh in world.meshes:
            mesh.adopt(alone)
        world.meshes[0].expect(world.membership.members[1:])
        world.link(0, 1)
        eventually(lambda: world.linked(0, 1), "a link")
        for mesh in world.meshes:
            mesh.adopt(Membership("ours", 2, world.membership.members))
        assert world.linked(0, 1)
    finally:
        world.close()


@pytest.mark.parametrize("fault", [SilentDial(), LinkStall()], ids=["connecting", "introducing"])
def test_a_dial_of_who_is_no_member_any_more_ends_at_once(pair: Meshes, fault: SilentDial | LinkStall) -> None:
    pair.faults.add(fault)
    low = pair.meshes[LOW]
    alone = Membership("ours", 2, pair.membership.members[LOW : LOW + 1])
    with ThreadPoolExecutor(2) as pool:
        dialing = pool.submit(pair.link, LOW, HIGH, 600)
        waiting = pool.submit(low.is_open, pair.nodes[HIGH].id, soon(600))
        eventually(lambda: any(pair.state._dialing for pair in low._peers.listed()), "a dial")
        low.adopt(alone)
        assert waiting.result(EVENT_TIMEOUT) is False
        with pytest.raises(PeerLost, match="it is no longer a member"):
            dialing.result(EVENT_TIMEOUT)


def test_who_waits_for_the_other_s_dial_does_not_when_its_node_closes(pair: Meshes) -> None:
    def act(what: str) -> bool:
        if what == "recall":
            pair.nodes[0].cancel_token.cancel()
            return True
        return pair.meshes[0].is_open(pair.nodes[1].id, soon())

    assert on_every(["wait", "recall"], act) == [False, True]


@pytest.fixture
def world() -> Iterator[Meshes]:
    made = Meshes(3)
    yield made
    made.close()


PAIRS = [(0, 1), (0, 2), (1, 2)]


def test_everybody_has_a_link_to_everybody_and_a_second_time_there_is_nothing_to_do(world: Meshes) -> None:
    on_every(world.meshes, lambda mesh: open_all(mesh, soon()))
    for pair in PAIRS:
        eventually(lambda pair=pair: world.linked(*pair), "a link")  # type: ignore[misc]
    links = [mesh.links() for mesh in world.meshes]
    on_every(world.meshes, lambda mesh: open_all(mesh, time.monotonic()))
    assert [mesh.links() for mesh in world.meshes] == links


def test_where_the_lower_rank_does_not_get_through_the_higher_one_does(
    world: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_HEAD_START", 0.1)
    world.faults.add(world.on_way(RefuseDial, 0, 2))
    on_every(world.meshes, lambda mesh: open_all(mesh, soon()))
    for pair in PAIRS:
        eventually(lambda pair=pair: world.linked(*pair), "a link")  # type: ignore[misc]


def test_a_pair_that_cannot_reach_each_other_is_named_when_all_have_been_tried(
    world: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_HEAD_START", 0.1)
    for way in [(0, 2), (2, 0)]:
        world.faults.add(world.on_way(RefuseDial, *way))

    def open_and_fail(rank: int) -> int | None:
        if rank == 1:
            open_all(world.meshes[rank], soon())
            return None
        with pytest.raises(PeerLost) as raised:
            open_all(world.meshes[rank], soon())
        return raised.value.rank

    assert on_every([0, 1, 2], open_and_fail) == [2, None, 0]
    for pair in [(0, 1), (1, 2)]:
        eventually(lambda pair=pair: world.linked(*pair), "a link")  # type: ignore[misc]


def test_a_link_that_was_lost_is_made_anew(world: Meshes) -> None:
    on_every(world.meshes, lambda mesh: open_all(mesh, soon()))
    lost = world.linked_to(0, 1)
    eventually(lambda: world.linked(0, 1), "a link")
    lost.lose("a cable was cut")
    on_every(world.meshes[:2], lambda mesh: open_all(mesh, soon()))
    eventually(lambda: world.linked(0, 1), "another link")
    assert world.linked_to(0, 1) is not lost


LARGE = EAGER_WORLD + 1


@pytest.fixture
def large_world() -> Iterator[Meshes]:
    made = Meshes(LARGE)
    yield made
    made.close()


def opened(world: Meshes, rank: int) -> set[int]:
    linked = world.meshes[rank].links()
    return {other for other, node in enumerate(world.nodes) if node.id in linked}


def test_in_a_large_world_everybody_has_a_link_to_whom_it_watches_and_to_its_watchers_and_no_other(
    large_world: Meshes,
) -> None:
    on_every(large_world.meshes, lambda mesh: open_first(mesh, "full_mesh", soon()))
    for rank in range(LARGE):
        assert opened(large_world, rank) == {*watched(LARGE, rank), *watchers(LARGE, rank)}


def test_in_a_large_world_whoever_cannot_be_dialed_is_named_by_its_watchers_though_it_can_dial(
    large_world: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_HEAD_START", 0.1)
    for rank in set(range(LARGE)) - {5}:
        large_world.faults.add(large_world.on_way(RefuseDial, rank, 5))

    def missing(rank: int) -> int | None:
        try:
            open_watching(large_world.meshes[rank], soon(2.0))
        except PeerLost as lost:
            return lost.rank
        return None

    found = on_every(range(LARGE), missing)
    assert {rank for rank, lost in enumerate(found) if lost == 5} == set(watchers(LARGE, 5))
    assert found[5] in watchers(LARGE, 5)


def test_in_a_large_world_a_dial_that_failed_is_repeated_once(
    large_world: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_HEAD_START", 0.1)
    dial, refused = large_world.meshes[6].relink, list[int]()

    def relink(node: int, deadline: float) -> object:
        if not refused:
            refused.append(node)
            raise PeerLost(node=node, cause="too many connections")
        return dial(node, deadline)

    monkeypatch.setattr(large_world.meshes[6], "relink", relink)
    on_every(large_world.meshes, lambda mesh: open_watching(mesh, soon()))
    assert opened(large_world, 6) == {*watched(LARGE, 6), *watchers(LARGE, 6)}


def test_in_a_sparse_topology_all_neighbours_are_linked_however_large_the_world_is() -> None:
    world = Meshes(LARGE, topology="k_regular:2")
    try:
        on_every(world.meshes, lambda mesh: open_first(mesh, "k_regular:2", soon()))
        for rank in range(LARGE):
            eventually(lambda rank=rank: opened(world, rank) == {(rank - 1) % LARGE, (rank + 1) % LARGE}, "two links")  # type: ignore[misc]
    finally:
        world.close()


@pytest.mark.parametrize(
    ("size", "topology", "early"),
    [
        (2, "full_mesh", True),
        (EAGER_WORLD, "full_mesh", True),
        (EAGER_WORLD + 1, "full_mesh", False),
        (4, "hypercube", False),
    ],
)
def test_ends_of_processes_count_before_their_ports_close_only_where_every_voter_has_a_link(
    size: int, topology: str, early: bool
) -> None:
    world = Meshes(size, adopt=False, topology=topology)
    try:
        asked: list[bool] = []
        for transport in world.nodes[0]._by_scheme.values():
            transport.lose_at_exit = asked.append  # type: ignore[method-assign]
        world.meshes[0].adopt(world.membership)
        assert asked == [early]
    finally:
        world.close()
