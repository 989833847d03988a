"""Between the commit of the first membership and its start: all members go on, or none."""

import pytest

from nexar.cluster.decisions.admission_events import (
    Applied,
    ChildDied,
    Commit,
    Connected,
    Fail,
    Gone,
    Inquired,
    Left,
    Note,
    Ready,
    Refuse,
    Start,
    StartFailed,
    Tick,
)
from nexar.cluster.decisions.starting import START_TIMEOUT
from nexar.wire.joining import Apply, Progress, Started
from tests.unit.cluster.decisions.door import PROOF, Door, a_door, ends, every, key, notes, only, told

RANKS = (1, 2, 3)


def join(door: Door, connection: int, rank: int | None = None, **more: object) -> list[object]:
    """A candidate that confirms, with more in its application."""
    facts: dict[str, object] = {"confirms": True, "addresses": {"quic": ("10.0.0.1:1",)}, **more}
    clock = float(facts.pop("seed_clock", 0.0))  # type: ignore[arg-type]
    asked = Apply(PROOF, b"request", "a", rank=rank, **facts)  # type: ignore[arg-type]
    applied = Applied(connection, asked, True, key(connection), clock)
    return [*door.greet(connection), *door.tell(applied, Ready(connection))]


def committed() -> Door:
    door = a_door(3)
    for connection in RANKS:
        join(door, connection, rank=connection - 1)
    return door


def test_the_cluster_starts_when_every_member_is_connected() -> None:
    door = committed()
    assert not only(door.actions, Commit).starts
    assert not every(door.tell(Connected(1), Connected(3), Connected(3)), Start)
    start = only(door.tell(Connected(2)), Start)
    assert (start.membership, set(start.connections)) == (door.machine.membership, {1, 2, 3})
    assert start.present == {1, 2, 3}
    assert door.machine.due(0.0) is None


def test_members_that_do_not_confirm_start_with_the_commit() -> None:
    door = a_door(2)
    door.join(1)
    assert only(door.join(2), Commit).starts


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Gone(2, "killed"), "rank 1 was lost before the cluster had started: killed"),
        (Left(2), "rank 1 was lost before the cluster had started: it left"),
        (StartFailed(2, "rank 1 cannot connect to rank 2"), "rank 1 cannot connect to rank 2"),
    ],
    ids=["killed", "left", "not connected"],
)
@pytest.mark.parametrize("after", [(), (Connected(1), Connected(2))], ids=["nobody", "two"])
def test_the_loss_of_a_member_before_the_start_is_told_to_every_member(
    event: Gone | Left | StartFailed, reason: str, after: tuple[Connected, ...]
) -> None:
    door = committed()
    door.tell(*after)
    actions = door.tell(event)
    fail = only(actions, Fail)
    assert fail.reason == reason
    assert set(fail.connections) >= {1, 3}
    assert "failed" in notes(actions)
    assert door.machine.failed
    assert door.machine.membership is None
    assert not every(door.tell(Connected(1), Connected(3)), Start)


def test_the_death_of_a_child_before_the_start_is_told_to_every_member_and_launcher() -> None:
    door = a_door(2)
    door.reserve(9, 2)
    for connection in (1, 2):
        join(door, connection, rank=connection - 1, launcher=9)
    fail = only(door.tell(ChildDied(9, 1, "Traceback\nValueError: no")), Fail)
    assert fail.reason == "rank 1 was lost before the cluster had started: ValueError: no"
    assert set(fail.connections) == {1, 2, 9}


def test_who_does_not_connect_in_time_is_named() -> None:
    door = committed()
    door.tell(Connected(1))
    door.now = 60.0
    assert door.machine.due(0.0) == 60.0
    assert only(door.tell(Tick()), Fail).reason == "ranks 1, 2 did not connect to the other ranks within 60 s"


def test_members_of_a_cluster_that_formed_late_have_time_to_connect() -> None:
    door = a_door(1, timeout=5.0)
    door.now = 4.9
    join(door, 1, rank=0)
    door.now = 5.0 + START_TIMEOUT / 2
    assert not every(door.tell(Tick()), Fail)
    assert only(door.tell(Connected(1)), Start)


def test_a_member_that_has_lost_its_line_since_the_start_is_told_again() -> None:
    door = committed()
    door.tell(*map(Connected, RANKS))
    assert not every(door.tell(Gone(2, "its line broke")), Fail)
    join(door, 4, epoch=1)
    assert told(door.tell(Connected(3)), Started) == [(Started(), (3,))]


def test_who_knocks_after_the_start_has_failed_is_told_why() -> None:
    door = committed()
    door.tell(Gone(2, "killed"))
    assert only(door.greet(7), Refuse).reason == "rank 1 was lost before the cluster had started: killed"


def test_a_candidate_that_dies_before_the_commit_is_replaced() -> None:
    door = a_door(3)
    join(door, 1, rank=0)
    join(door, 2, rank=1)
    door.tell(Gone(2, "killed"))
    join(door, 3, rank=1)
    join(door, 4, rank=2)
    only(door.tell(Connected(1), Connected(3), Connected(4)), Start)
    assert door.order() == [1, 3, 4]


# ---------------------------------------------------------------- who cannot work together


def test_two_candidates_without_a_common_transport_end_the_formation_and_both_are_named() -> None:
    door = a_door(3)
    join(door, 1, rank=0, addresses={"tls": ("10.0.0.1:1",)})
    actions = join(door, 2, rank=1)
    reason = "rank 0 offers tls, rank 1 offers quic\nthey have no transport in common; set NEXAR_TRANSPORTS"
    assert only(actions, Refuse).reason == reason
    assert only(actions, Fail).reason == reason
    assert only(actions, Fail).connections == (1,)


def test_who_brought_no_rank_is_refused_alone_and_somebody_else_may_come() -> None:
    door = a_door(2)
    join(door, 1, addresses={"tls": ("10.0.0.1:1",)})
    assert only(join(door, 2), Refuse).connection == 2
    assert not every(door.actions, Fail)
    only(join(door, 3, addresses={"tls": ("10.0.0.3:1",)}), Commit)


def test_a_transport_that_only_one_of_many_lacks_is_found_whoever_came_first() -> None:
    door = a_door(4)
    both = {"quic": ("10.0.0.1:1",), "tls": ("10.0.0.1:1",)}
    join(door, 1, rank=0, addresses=both)
    join(door, 2, rank=1, addresses={"tls": ("10.0.0.1:1",)})
    join(door, 3, rank=2, addresses=both)
    assert "rank 1 offers tls, rank 3 offers quic" in only(join(door, 4, rank=3), Fail).reason


def test_settings_that_differ_are_named_with_both_values_and_both_ranks() -> None:
    door = a_door(3)
    join(door, 1, rank=0, settings={"topology": "full_mesh", "ring_max_world": "8"})
    fail = only(join(door, 2, rank=2, settings={"topology": "hypercube", "ring_max_world": "8"}), Fail)
    assert fail.reason == (
        "NEXAR_TOPOLOGY is hypercube on rank 2 and full_mesh on rank 0\nset the same value on every rank"
    )


def test_a_setting_that_the_other_does_not_know_is_not_compared() -> None:
    door = a_door(2)
    join(door, 1, rank=0, settings={"topology": "full_mesh"})
    only(join(door, 2, rank=1, settings={"topology": "full_mesh", "new": "1"}), Commit)


def test_who_went_is_not_compared_with() -> None:
    door = a_door(2)
    join(door, 1, rank=0, settings={"topology": "hypercube"}, addresses={"tls": ("10.0.0.1:1",)})
    door.tell(Gone(1, "killed"))
    join(door, 2, rank=0, settings={"topology": "full_mesh"})
    only(join(door, 3, rank=1, settings={"topology": "full_mesh"}), Commit)


@pytest.mark.parametrize(("clock", "words"), [(10_000.0, "1800 s behind"), (13_600.0, "1800 s ahead of")])
def test_a_clock_beyond_the_limit_is_named_with_both_times(clock: float, words: str) -> None:
    door = a_door(2)
    join(door, 1, rank=0, clock=11_800.0, seed_clock=11_800.0)
    actions = join(door, 2, rank=1, clock=clock, seed_clock=11_800.0)
    reason = only(actions, Refuse).reason
    assert f"the clock of rank 1 is {words} the seed's" in reason
    assert "1970-01-01 03:16:40 UTC" in reason
    assert only(actions, Fail).reason == reason
    assert reason.splitlines()[0].endswith("the seed's"), "the times and the remedy are on further lines"


INCOMPATIBLE = [
    {"clock": 10_000.0, "seed_clock": 11_800.0},
    {"settings": {"topology": "hypercube", "pipeline_segment_bytes": "65536"}},
    {"addresses": {"tls": ("10.0.0.1:1",)}},
    {"size": 3},
]


@pytest.mark.parametrize("facts", INCOMPATIBLE)
def test_the_reason_of_a_refusal_says_who_and_what_first_and_the_remedy_on_a_further_line(facts: object) -> None:
    door = a_door(2)
    join(door, 1, rank=0, size=2, settings={"topology": "full_mesh", "pipeline_segment_bytes": "1024"})
    first, *further = only(join(door, 2, rank=1, **facts), Refuse).reason.splitlines()  # type: ignore[arg-type]
    assert "rank 1" in first
    assert len(f"the cluster did not form: {first}") <= 120
    assert "set " in further[-1] or "give " in further[-1]


@pytest.mark.parametrize("clock", [11_201.0, 12_399.0])
def test_a_clock_within_the_limit_is_let_in(clock: float) -> None:
    only(join(a_door(1), 1, rank=0, clock=clock, seed_clock=11_800.0), Commit)


def test_a_joiner_of_a_cluster_that_has_formed_is_compared_too() -> None:
    door = a_door(1, elastic=True)
    join(door, 1, rank=0, settings={"topology": "full_mesh"})
    door.tell(Connected(1))
    assert "NEXAR_TOPOLOGY is hypercube" in only(join(door, 2, settings={"topology": "hypercube"}), Refuse).reason
    assert not ends(join(door, 3, settings={"topology": "full_mesh"}))


# ---------------------------------------------------------------- a world of another size, and who is waited for


def test_who_was_started_for_a_world_of_another_size_is_refused_and_the_others_can_ask() -> None:
    door = a_door(2)
    join(door, 1, rank=0, size=2)
    reason = only(join(door, 2, rank=1, size=3), Refuse).reason
    assert reason.startswith("rank 1 was started as one of 3, and this cluster forms with 2")
    assert not every(door.actions, Fail)
    ((progress, connections),) = told(door.tell(Inquired(1)), Progress)
    assert (progress.joined, progress.expected, progress.missing, connections) == (1, 2, (1,), (1,))
    assert list(progress.refused.values()) == [reason.replace("\n", "; ")]


def test_the_first_of_a_host_reports_whom_all_wait_for() -> None:
    door = a_door(4)
    join(door, 1)
    join(door, 2)
    first, second = (told(door.tell(Inquired(connection)), Progress)[0][0] for connection in (1, 2))
    assert (first.reports, second.reports) == (True, False)
    assert first.missing == (), "nobody has claimed a rank, so nobody can say which one is missing"
    assert not door.tell(Inquired(9))


def test_who_leaves_when_it_has_seen_the_proof_of_the_seed_is_noted_as_refused_with_its_address() -> None:
    door = a_door(2)
    door.greet(1)
    (note,) = every(door.tell(Gone(1, "it closed the line")), Note)
    assert (note.kind, note.address, note.node) == ("refused", "10.0.0.9:1", 1)
    assert "another ticket or token" in note.reason
    assert list(door.machine.refused.values()) == [note.reason]
