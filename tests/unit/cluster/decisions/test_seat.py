"""The seed's vote: kept before it is said, and not for the removal of who answers."""

from nexar.cluster.change import Change, Departure
from nexar.cluster.decisions.admission_events import KeepVote, Tell
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.seat import PROBE_TIMEOUT, Deed, Seat
from nexar.cluster.decisions.witness import Witness
from nexar.cluster.membership import Member, Membership
from nexar.wire import joining
from nexar.wire.joining import AreYouThere
from nexar.wire.messages import Accept, Accepted, Chosen, Message, Number, Prepare, Promise, Rejected, Unknown, decode
from tests.unit.cluster.decisions.door import SEED, key

MEMBERSHIP = Membership("c", 1, tuple(Member(node, "a", key(node), {}) for node in (1, 2)), seed=SEED)
INSTANCE = (0, 1, 0)
BALLOT = Number(1, 1)
WITHOUT_2 = Change(2, left=(Departure(2, "silent"),)).encode()


class Scene:
    """A seed with lines to members; connections have ten times their number."""

    def __init__(self, *connected: int, awaited: frozenset[int] = frozenset(), witness: Witness | None = None) -> None:
        self.lines = {node: Guest(10 * node, "x") for node in connected}
        self.awaited = set(awaited)
        self.witness = witness or Witness(MEMBERSHIP)
        self.seat = Seat(self.witness, self.lines, self.awaited.__contains__)

    def propose(self, value: bytes = WITHOUT_2, now: float = 0.0) -> list[Deed]:
        """Node 1 asks for a promise and for this value; what follows from the second."""
        promised = self.seat.heard(1, Prepare(INSTANCE, BALLOT), now)
        assert [type(said) for said in words(promised)] == [Promise]
        return self.seat.heard(1, Accept(INSTANCE, BALLOT, value), now)


def words(deeds: list[Deed], to: int | None = None) -> list[Message | Unknown]:
    """What was said, to a connection if one is given."""
    tells = [deed for deed in deeds if isinstance(deed, Tell) and (to is None or to in deed.connections)]
    return [decode(tell.message.body) for tell in tells if isinstance(tell.message, joining.Word)]


def asked(deeds: list[Deed]) -> list[tuple[int, tuple[int, ...]]]:
    tells = [deed for deed in deeds if isinstance(deed, Tell)]
    return [(tell.message.number, tell.connections) for tell in tells if isinstance(tell.message, AreYouThere)]


def test_a_vote_is_kept_before_it_is_said() -> None:
    scene = Scene(1)
    keep, tell = scene.seat.heard(1, Prepare(INSTANCE, BALLOT), 0.0)
    assert isinstance(keep, KeepVote)
    assert keep.vote.promised == BALLOT
    assert isinstance(tell, Tell)
    assert tell.connections == (10,)
    again = scene.seat.heard(1, Prepare(INSTANCE, BALLOT), 0.0)
    assert [type(deed) for deed in again] == [Tell]  # nothing new to keep


def test_who_has_no_line_is_unreachable_at_once() -> None:
    deeds = Scene(1).propose()
    assert [type(deed) for deed in deeds] == [KeepVote, Tell]
    assert [type(said) for said in words(deeds, to=10)] == [Accepted]


def test_who_answers_is_not_removed() -> None:
    scene = Scene(1, 2)
    deeds = scene.propose()
    ((number, to),) = asked(deeds)
    assert to == (20,)
    assert words(deeds) == []  # it looks first
    assert scene.seat.answered(2, number + 1, 0.5) == []
    (rejected,) = words(scene.seat.answered(2, number, 0.5))
    assert isinstance(rejected, Rejected)
    assert rejected.reachable == (2,)
    assert scene.seat.due(0.5) is None


def test_who_does_not_answer_in_time_is_unreachable() -> None:
    scene = Scene(1, 2)
    scene.propose()
    assert scene.seat.due(0.0) == PROBE_TIMEOUT
    assert scene.seat.tick(PROBE_TIMEOUT / 2) == []
    assert [type(said) for said in words(scene.seat.tick(PROBE_TIMEOUT))] == [Accepted]
    assert scene.seat.tick(2 * PROBE_TIMEOUT) == []


def test_whose_line_breaks_while_it_is_asked_is_unreachable() -> None:
    scene = Scene(1, 2)
    scene.propose()
    del scene.lines[2]
    assert [type(said) for said in words(scene.seat.lost(2, "reset", 0.1))] == [Accepted]
    assert scene.seat.lost(2, "reset", 0.1) == []


def test_who_may_still_come_back_to_a_restarted_seed_has_time_to() -> None:
    scene = Scene(1, awaited=frozenset({2}))
    assert words(scene.propose()) == []
    scene.lines[2] = Guest(20, "x")
    ((number, _),) = asked(scene.seat.returned(2))
    assert [type(said) for said in words(scene.seat.answered(2, number, 0.5))] == [Rejected]
    assert scene.seat.returned(1) == []


def test_what_was_chosen_is_followed_and_told_to_all_in_one_message() -> None:
    scene = Scene(1, 2)
    deeds = scene.seat.heard(1, Chosen(INSTANCE, WITHOUT_2), 0.0)
    assert deeds[0] == Change.decode(WITHOUT_2)
    (tell,) = [deed for deed in deeds if isinstance(deed, Tell)]
    assert set(tell.connections) == {10, 20}
    assert scene.witness.membership.epoch == 2


def test_a_restarted_seed_keeps_its_promise() -> None:
    before = Scene(1, 2)
    before.seat.heard(1, Prepare(INSTANCE, Number(7, 1)), 0.0)
    scene = Scene(1, 2, witness=Witness(MEMBERSHIP, vote=before.witness.vote))
    (rejected,) = words(scene.seat.heard(2, Prepare(INSTANCE, Number(3, 2)), 0.0))
    assert isinstance(rejected, Rejected)
    assert rejected.promised == Number(7, 1)
