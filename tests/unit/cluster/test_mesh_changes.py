"""Links of members that are none any more, or of nodes that are about to close."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from nexar.cluster.membership import Membership
from nexar.errors import PeerLost
from nexar.testing.faults import SilentDial, Stall
from tests.ranks import PATIENCE, on_every
from tests.unit.cluster.memory_mesh import Meshes, eventually, soon

LOW, HIGH = 0, 1


@pytest.fixture
def pair() -> Iterator[Meshes]:
    made = Meshes(2)
    yield made
    made.close()


@pytest.mark.parametrize("fault", [SilentDial(), Stall()], ids=["connecting", "introducing"])
def test_a_dial_of_who_is_no_member_any_more_ends_at_once(pair: Meshes, fault: SilentDial | Stall) -> None:
    pair.faults.add(fault)
    low = pair.meshes[LOW]
    alone = Membership("ours", 2, pair.membership.members[LOW : LOW + 1])
    with ThreadPoolExecutor(2) as pool:
        dialing = pool.submit(pair.link, LOW, HIGH, 600)
        waiting = pool.submit(low.is_open, pair.nodes[HIGH].id, soon(600))
        eventually(lambda: any(pair.state._dialing for pair in low._pairs.listed()), "a dial")
        low.adopt(alone)
        assert waiting.result(PATIENCE) is False
        with pytest.raises(PeerLost, match="it is no member any more"):
            dialing.result(PATIENCE)


def test_who_waits_for_the_other_s_dial_does_not_when_its_node_closes(pair: Meshes) -> None:
    def act(what: str) -> bool:
        if what == "recall":
            pair.nodes[0].recall.make()
            return True
        return pair.meshes[0].is_open(pair.nodes[1].id, soon())

    assert on_every(["wait", "recall"], act) == [False, True]
