"""Members die, links break and heal, messages are lost, late, doubled: never two memberships of one epoch, nobody comes
back who was removed, and when all is well again those who live agree.
"""

from dataclasses import dataclass
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from nexar.cluster.decisions.membership_events import (
    ChangeRequested,
    PeerLossFound,
    PeerReachable,
    RecoverNow,
    ResignRequested,
    SendMessage,
)
from tests.losses import silent
from tests.unit.cluster.decisions.voters import SEED_NODE, Parliament

mishaps = st.lists(
    st.tuples(
        st.sampled_from(["kill", "kill", "cut", "heal", "doubt", "sever", "renew", "resign", "seed", "nothing"]),
        st.integers(0, 100),
        st.integers(0, 100),
        st.sampled_from([0.0, 0.0005, 0.002, 0.004, 0.02, 0.3, 2.0]),
    ),
    max_size=10,
)


@dataclass
class NetworkFaults:
    """Of the network."""

    loss: float
    repeats: float
    longest: float

    def __call__(self, random: Random) -> float | None:
        return None if random.random() < self.loss else random.uniform(0.0005, self.longest)


weathers = st.builds(
    NetworkFaults,
    st.sampled_from([0.0, 0.0, 0.1, 0.4]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.001, 0.02, 0.3]),
)


class Storm(Parliament):
    """A parliament on a faulty network."""

    def __init__(self, size: int, faults: NetworkFaults, *, active: bool, chance: int) -> None:
        super().__init__(size, active=active, chance=chance, latency=faults, recovery_timeout=5.0)
        self.size = size
        self.faults = faults

    def _carry(self, node: int, say: SendMessage) -> None:
        super()._carry(node, say)
        if self.random.random() < self.faults.repeats:
            super()._carry(node, say)

    def suffer(self, what: str, one: int, other: int) -> None:
        here = [node for node in self.living() if node not in self.expelled]
        if not here:
            return
        first, second = here[one % len(here)], here[other % len(here)]
        if what == "kill" and 2 * (len(self.dead - {SEED_NODE}) + 1) < self.size:
            self.kill(first)
        elif what == "cut":
            self._cut(first, second if other % 5 else SEED_NODE)
        elif what == "heal":
            self._heal()
        elif what == "seed":
            self.dead ^= {SEED_NODE}
        elif first != second:
            self._imagine(what, first, second, one)

    def _imagine(self, what: str, first: int, second: int, chance: int) -> None:
        """Nothing is broken; a node gets an event."""
        if what == "doubt":
            self.feed(first, PeerLossFound(second, silent("a false alarm")))
            self.feed(first, PeerReachable(second), chance / 100)
        elif what == "sever":
            self.feed(first, PeerReachable(second, severed=True))
            self.feed(second, PeerReachable(first, severed=True), chance / 100)
        elif what == "renew":
            for node in self.living():
                self.feed(node, ChangeRequested(renewed=(7,), epoch=self.member(node).membership.epoch))
        elif what == "resign" and chance % 5 == 0:
            self.feed(first, ResignRequested("enough"))

    def _cut(self, one: int, other: int) -> None:
        if one == other:
            return
        self.cut.add(frozenset((one, other)))
        self.feed(one, PeerLossFound(other, silent()))
        if other != SEED_NODE:
            self.feed(other, PeerLossFound(one, silent()))

    def _heal(self) -> None:
        for one, other in (tuple(pair) for pair in list(self.cut)):
            for node, peer in ((one, other), (other, one)):
                if node != SEED_NODE and node not in self.dead and peer not in self.dead:
                    self.feed(node, PeerReachable(peer, severed=peer != SEED_NODE))
        self.cut.clear()

    def calm(self) -> None:
        """Everything works again, the dead are known to be dead, heartbeats go round."""
        self.faults.loss, self.faults.longest = 0.0, 0.002
        self.dead.discard(SEED_NODE)
        self._heal()
        for node in self.living():
            for other in (*self.living(), SEED_NODE):
                self.feed(node, PeerReachable(other))
            for dead in self.dead:
                self.feed(node, PeerLossFound(dead, silent("it was killed")))
        for _ in range(25):
            for node in self.living():
                self.feed(node, RecoverNow())
            self.run(0.5)
            self.send_heartbeats()
        self.run(0.1)


@given(st.integers(2, 8), weathers, st.booleans(), st.integers(0, 2**32), mishaps)
def test_whatever_happens_there_is_one_membership_for_an_epoch_and_in_the_end_all_agree(
    size: int, faults: NetworkFaults, active: bool, chance: int, story: list[tuple[str, int, int, float]]
) -> None:
    house = Storm(size, faults, active=active, chance=chance)
    for what, one, other, pause in story:
        house.suffer(what, one, other)
        house.run(pause)
    house.calm()
    newest = max((machine.membership for machine in house.machines.values()), key=lambda each: each.epoch)
    members = {member.node for member in newest.members}
    assert members.isdisjoint(house.expelled)
    living = members - house.dead
    if 2 * (len(living) + (len(members) % 2 == 0)) > len(members) + (len(members) % 2 == 0):
        assert house.agreed() == sorted(members)
        assert members.isdisjoint(house.dead)
        assert set(house.living()) == members | house.expelled.keys()
