"""One idle connection whose end is the news.

Death lines between real nodes on loopback.
"""

import threading
from collections.abc import Callable, Iterator

import pytest

from nexar.cluster.liveness_connections import LivenessConnection
from nexar.cluster.membership import Membership
from nexar.security.authority import Authority
from nexar.wire.control import Introduce
from tests.ranks import on_every
from tests.unit.cluster.connection_ends import End
from tests.unit.cluster.fake_carrier import FakeCarrier, as_carrier
from tests.unit.cluster.memory_mesh import eventually


class Scene:
    def __init__(self) -> None:
        self.carrier = FakeCarrier(verified=True)
        self.over: list[tuple[LivenessConnection, str | None]] = []
        self.line = LivenessConnection(as_carrier(self.carrier), lambda *how: self.over.append(how))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_it_takes_the_carrier_over(scene: Scene) -> None:
    assert scene.carrier.sink is scene.line
    assert scene.line.peer == scene.carrier.peer.node


def test_its_loss_is_reported_once_with_how_it_came(scene: Scene) -> None:
    scene.carrier.lose()
    scene.line.finish()
    assert scene.over == [(scene.line, "its connection ended: it is gone")]


def test_who_closes_it_politely_leaves_no_cause_and_is_answered(scene: Scene) -> None:
    scene.carrier.half_close()
    assert scene.over == [(scene.line, None)]
    assert scene.carrier.finished


def test_a_line_that_this_side_closed_is_over_when_the_peer_agrees(scene: Scene) -> None:
    scene.line.finish()
    assert scene.carrier.finished
    assert not scene.over
    scene.carrier.half_close()
    assert scene.over == [(scene.line, None)]


def test_who_speaks_on_it_loses_it(scene: Scene) -> None:
    scene.carrier.say(b"hello")
    assert scene.carrier.aborted == "no data is allowed on a liveness connection"
    assert scene.over == [(scene.line, "it sent data on a liveness connection")]
    scene.line.payload_arrived(as_carrier(scene.carrier), 1)
    assert len(scene.over) == 1


def test_it_can_be_ended_at_once(scene: Scene) -> None:
    scene.line.abort("enough")
    assert scene.carrier.aborted == "enough"
    assert not scene.over


Ends = Callable[..., list[End]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made: list[End] = []

    def making(count: int, *schemes: str, adopt: bool = True) -> list[End]:
        authority = Authority.create("ours")
        made.extend(End() for _ in range(count))
        for end in made:
            end.certify(authority)
        if adopt:
            settle(made, *schemes)
        return made

    yield making
    on_every(made, End.close)


def settle(ends: list[End], *schemes: str, epoch: int = 1) -> Membership:
    membership = Membership("ours", epoch, tuple(end.member for end in ends))
    for end in ends:
        end.adopt(membership, *schemes)
    return membership


def others(end: End, ends: list[End]) -> set[int]:
    return {each.node.id for each in ends if each is not end}


def lined(ends: list[End]) -> None:
    eventually(lambda: all(end.lines.peers == others(end, ends) for end in ends), "a line between any two")


def test_those_who_watch_one_another_have_one_line_each(ends: Ends) -> None:
    some = ends(3)
    lined(some)
    assert all(end.ended == [] for end in some)


def test_a_connection_for_which_no_thread_could_be_started_is_dialed_later(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def no_dials(thread: threading.Thread) -> None:
        if thread.name.startswith("nexar-dial"):
            raise RuntimeError("can't start new thread")
        start(thread)

    some = ends(2, adopt=False)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_dials)
        settle(some)
        eventually(lambda: "not dialed: can't start new thread" in caplog.text, "a dial that could not begin")
    lined(some)


def test_a_line_that_is_not_over_tls_is_declined(ends: Ends) -> None:
    (one,) = ends(1)
    carrier = FakeCarrier(verified=True)
    for scheme, messages in (("tls", None), ("tcp", "uses tls, not tcp"), ("quic", "uses tls, not quic")):
        carrier.scheme = scheme
        verdict = one.lines.why_refused(as_carrier(carrier), Introduce(rank=0, epoch=1, death_line=True))
        assert (verdict is None) == (messages is None)
        assert (messages or "") in (verdict or "")
    assert one.lines.why_refused(as_carrier(carrier), Introduce(rank=0, epoch=1)) is None


def test_a_node_that_closes_its_lines_politely_is_no_news(ends: Ends) -> None:
    one, two, three = ends(3)
    lined([one, two, three])
    two.lines.close()
    eventually(lambda: one.lines.peers == {three.node.id} and three.lines.peers == {one.node.id}, "the end")
    assert one.ended == three.ended == two.ended == []


def test_a_line_that_breaks_is_reported_at_the_other_end_and_dialed_again(ends: Ends) -> None:
    one, two = ends(2)
    lined([one, two])
    one.lines._connections[two.node.id]._carrier.abort("a cable was cut")  # its own sink receives nothing of that
    eventually(lambda: two.ended, "the news")
    assert two.ended[0][0] == one.node.id
    assert two.ended[0][1].startswith("its connection ended: ")
    with one.lines._changed:
        del one.lines._connections[two.node.id]
    lined([one, two])


@pytest.mark.parametrize("scheme", ["tls", "shm"])
def test_a_connection_that_reports_as_much_makes_another_one_unnecessary(ends: Ends, scheme: str) -> None:
    one, two = ends(2, "quic", scheme)
    eventually(lambda: one.lines._goals[two.node.id].pause > 0.5, "a look")
    assert not one.lines._goals[two.node.id].dialing
    one.links[two.node.id].schemes = two.links[one.node.id].schemes = ("quic",)
    lined([one, two])  # looked at again and again


def test_the_next_membership_keeps_lines_to_who_stays(ends: Ends) -> None:
    one, two, three = ends(3)
    lined([one, two, three])
    line = one.lines._connections[three.node.id]
    settle([one, three], epoch=2)
    eventually(lambda: one.lines.peers == {three.node.id} and three.lines.peers == {one.node.id}, "two")
    assert one.lines._connections[three.node.id] is line
    eventually(lambda: len(two.ended) == 2, "the news to who was left out")
    assert one.ended == three.ended == []


def test_a_dial_under_another_epoch_is_taken_too(ends: Ends) -> None:
    one, two = ends(2, adopt=False)
    two.adopt(Membership("ours", 1, (one.member, two.member)))
    one.adopt(Membership("ours", 2, (one.member, two.member)))
    lined([one, two])
