"""One idle connection whose end is the news."""

import pytest

from nexar.cluster.death_line import DeathLine
from tests.unit.cluster.fake_carrier import FakeCarrier, as_carrier


class Scene:
    def __init__(self) -> None:
        self.carrier = FakeCarrier(verified=True)
        self.over: list[tuple[DeathLine, str | None]] = []
        self.line = DeathLine(as_carrier(self.carrier), lambda *how: self.over.append(how))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_it_takes_the_carrier_over(scene: Scene) -> None:
    assert scene.carrier.sink is scene.line
    assert scene.line.peer == scene.carrier.peer.node


def test_its_loss_is_told_once_with_how_it_came(scene: Scene) -> None:
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
    assert scene.carrier.aborted == "nothing is said on a death line"
    assert scene.over == [(scene.line, "it spoke on a line where nothing is said")]
    scene.line.payload_arrived(as_carrier(scene.carrier), 1)
    assert len(scene.over) == 1


def test_it_can_be_ended_at_once(scene: Scene) -> None:
    scene.line.abort("enough")
    assert scene.carrier.aborted == "enough"
    assert not scene.over
