"""The state comes whole, or the joiner is left out."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from nexar.cluster.control_loop import CancelToken
from nexar.cluster.membership import Member, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.communicator import state_transfer
from nexar.communicator.bootstrap import open_mesh
from nexar.communicator.state_transfer import StateReceiver, checksum, send_state
from nexar.config import Config
from nexar.errors import UsageError
from nexar.transport.memory import MemoryNetwork
from nexar.wire.control import StateOffer
from tests.ranks import EVENT_TIMEOUT
from tests.unit.cluster.memory_mesh import eventually, member_of

SHORT = 0.3


class Scene:
    """One member, and joiners that it expects; the last of these is deaf."""

    def __init__(self, undo: ExitStack, joiners: int) -> None:
        network = MemoryNetwork()
        self.nodes = [undo.enter_context(Node(Config(), network)) for _ in range(1 + joiners)]
        self.member, *self.joiners = [member_of(node) for node in self.nodes]
        self.membership = Membership("ours", 4, (self.member,))
        self.meshes: list[Mesh] = []
        self.receivers: list[StateReceiver] = []
        for node in self.nodes:
            mesh = open_mesh(node)
            undo.callback(mesh.close)
            self.meshes.append(mesh)
            if node is not self.nodes[0]:
                self.receivers.append(StateReceiver(node, mesh))
                if node is not self.nodes[-1]:
                    mesh.control.connect(self.receivers[-1].offered, StateOffer)
        for mesh in self.meshes:
            mesh.adopt(self.membership)
        self.meshes[0].expect(self.joiners)

    def give(self, state: object, joiners: list[Member], timeout: float = EVENT_TIMEOUT) -> tuple[int, ...]:
        return send_state(self.nodes[0], self.meshes[0], state, joiners, timeout)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as undo:
        yield Scene(undo, 3)


def test_arrays_and_objects_come_as_they_were(scene: Scene) -> None:
    large = np.random.default_rng(1).standard_normal(300_000)
    first, second, _ = scene.joiners
    state = {"step": 7, "large": large, "small": [np.arange(3, dtype=np.int8), None, "text"]}
    assert scene.give(state, [first, second]) == (first.node, second.node)
    for receiver in scene.receivers[:2]:
        assert receiver.state["step"] == 7
        assert receiver.state["large"].tobytes() == large.tobytes()
        assert receiver.state["small"][0].dtype == np.int8
        assert receiver.state["small"][1:] == [None, "text"]


def test_there_may_be_no_state_at_all(scene: Scene) -> None:
    assert scene.give(None, scene.joiners[:1]) == (scene.joiners[0].node,)
    assert scene.receivers[0].state is None


def test_who_does_not_take_it_in_time_is_left_out_and_the_others_have_it(scene: Scene) -> None:
    first, _, deaf = scene.joiners
    assert scene.give("state", [deaf, first], SHORT) == (first.node,)
    assert [receiver.state for receiver in scene.receivers] == ["state", None, None]


def test_nobody_goes_on_with_it_when_the_members_change(scene: Scene) -> None:
    cancel_token, deaf = CancelToken(), scene.joiners[-1]
    with ThreadPoolExecutor(1) as pool:
        giving = pool.submit(
            send_state, scene.nodes[0], scene.meshes[0], "state", [deaf], 10 * EVENT_TIMEOUT, cancel_token=cancel_token
        )
        eventually(scene.meshes[0].links, "a link")
        cancel_token.cancel()
        assert giving.result(EVENT_TIMEOUT) == ()
    assert (
        send_state(scene.nodes[0], scene.meshes[0], "state", scene.joiners, EVENT_TIMEOUT, cancel_token=cancel_token)
        == ()
    )


def test_who_is_gone_is_left_out(scene: Scene) -> None:
    gone = Member(77, "nowhere", bytes(32), {"memory": ("nobody",)})
    scene.meshes[0].expect([*scene.joiners, gone])
    assert scene.give("state", [gone, scene.joiners[0]]) == (scene.joiners[0].node,)


def test_who_has_something_else_is_left_out(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    right = state_transfer.checksum
    sums = iter([1, 2])
    monkeypatch.setattr(state_transfer, "checksum", lambda parts: right(parts) + next(sums))
    assert scene.give("state", scene.joiners[:1]) == ()


def test_it_can_be_given_again(scene: Scene) -> None:
    for number in range(3):
        assert scene.give(number, scene.joiners[:2]) == tuple(joiner.node for joiner in scene.joiners[:2])
        assert [receiver.state for receiver in scene.receivers[:2]] == [number, number]


def test_what_cannot_be_sent_is_refused(scene: Scene) -> None:
    with pytest.raises(UsageError):
        scene.give(lambda: None, scene.joiners[:1])


def test_an_offer_of_somebody_else_is_passed_over(scene: Scene) -> None:
    receiver = scene.receivers[0]
    for peer, offer in ((scene.joiners[1].node, StateOffer(1, 4)), (scene.member.node, StateOffer(12345, 4))):
        receiver._receive(peer, offer)
    assert receiver.state is None


def test_the_checksum_knows_where_one_part_ends() -> None:
    def of(*parts: bytes) -> int:
        return checksum([memoryview(part) for part in parts])

    assert of(b"ab", b"c") == of(b"ab", b"c")
    assert len({of(), of(b""), of(b"", b""), of(b"abc"), of(b"ab", b"c"), of(b"a", b"bc")}) == 6
