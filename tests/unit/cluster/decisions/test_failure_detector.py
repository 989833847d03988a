"""Who is alive, stuck or silent, in time that a test owns.

How slow this node is, by the clock of a test.

Who watches whom.
"""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.cluster.decisions.failure_detector import (
    IF_SLOW,
    LONGEST,
    WATCH_ALL_UP_TO,
    FailureDetector,
    LivenessReport,
    OwnDelay,
    longest_extension,
    watched,
    watchers,
)
from nexar.topology import neighbors
from nexar.wire.control import Beat, CurrentCall

INTERVAL, TIMEOUT, STUCK = 1.0, 5.0, 60.0
PEER, OTHER = 7, 8
ALL_REDUCE = CurrentCall(0, "all_reduce", 1234, step=3, age=6.0)


class Watch:
    """A detector, and a clock that stops at every tick."""

    def __init__(self, *nodes: int, sends_when_stuck: bool = True) -> None:
        self.now = 100.0
        self.sends_when_stuck = sends_when_stuck
        self.detector = FailureDetector(INTERVAL, TIMEOUT, STUCK)
        self.detector.watch(nodes or (PEER,), self.now)
        self.received = 0
        self.found: list[LivenessReport] = []

    def pass_(self, seconds: float, *, packets: bool = False, heartbeat: Beat | None = None) -> list[LivenessReport]:
        """Tick whenever it is due; `packets` come, and a heartbeat, before each. Returns what was found on the way."""
        before = len(self.found)
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.detector.due(self.now) or end)
            self.come(packets=packets, heartbeat=heartbeat)
            self.found += self.detector.tick(self.now)
        return self.found[before:]

    def come(self, *, packets: bool = False, heartbeat: Beat | None = None) -> None:
        self.received += packets
        self.detector.record_traffic(PEER, self.received, self.now, sends_when_stuck=self.sends_when_stuck)
        if heartbeat is not None:
            self.detector.record_heartbeat(PEER, heartbeat, self.now)

    def sleep(self, seconds: float) -> list[LivenessReport]:
        """This node does not run."""
        self.now += seconds
        return self.detector.tick(self.now)


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_who_sends_heartbeats_is_alive_and_that_is_no_news(watch: Watch) -> None:
    assert watch.pass_(300, packets=True, heartbeat=Beat(1)) == []


def test_who_sends_nothing_at_all_is_silent_after_the_timeout_and_that_is_reported_once(watch: Watch) -> None:
    watch.pass_(3, packets=True, heartbeat=Beat(1))
    assert watch.pass_(4.9) == []
    (found,) = watch.pass_(30)
    assert (found.node, found.state, found.since, found.is_loss) == (PEER, "silent", 103.0, True)
    assert found.cause.startswith("no packet for 5 s")


def test_who_sends_again_is_reported_as_alive(watch: Watch) -> None:
    watch.pass_(10)
    (found,) = watch.pass_(1, packets=True, heartbeat=Beat(1))
    assert (found.state, found.is_loss) == ("alive", False)
    assert watch.pass_(4, packets=True, heartbeat=Beat(1)) == []


def test_who_is_alive_again_is_not_stuck_for_the_heartbeats_of_its_silence(watch: Watch) -> None:
    watch.pass_(3, packets=True, heartbeat=Beat(1))
    watch.pass_(30)
    assert [found.state for found in watch.pass_(TIMEOUT - 0.1, packets=True)] == ["alive"]
    assert [found.state for found in watch.pass_(TIMEOUT, packets=True)] == ["stuck"]


def test_packets_without_heartbeats_are_a_process_that_is_stuck_and_no_loss_for_a_minute(watch: Watch) -> None:
    watch.pass_(1, packets=True, heartbeat=Beat(1, (ALL_REDUCE,)))
    watch.found.clear()
    (stuck,) = watch.pass_(59, packets=True)
    assert (stuck.state, stuck.is_loss, stuck.doing) == ("stuck", False, ALL_REDUCE)
    assert stuck.cause == "alive but stuck in all_reduce #1234 for 11 s, no heartbeat for 5 s"
    (hung,) = watch.pass_(10, packets=True)
    assert (hung.state, hung.is_loss) == ("hung", True)
    assert hung.cause == "alive but stuck in all_reduce #1234 for 66 s, no heartbeat for 60 s"


def test_a_process_that_is_stuck_in_no_call_is_reported_as_well(watch: Watch) -> None:
    (stuck,) = watch.pass_(10, packets=True)
    assert stuck.cause == "alive but stuck, no heartbeat for 5 s: its Python code does not run"
    assert [found.state for found in watch.pass_(3, packets=True, heartbeat=Beat(1))] == ["alive"]


def test_a_process_that_is_stuck_and_then_stops_is_silent(watch: Watch) -> None:
    watch.pass_(10, packets=True)
    assert [found.state for found in watch.pass_(10)] == ["silent"]


def test_where_nothing_comes_without_python_stuck_and_stopped_are_one_loss() -> None:
    watch = Watch(sends_when_stuck=False)
    watch.pass_(2, packets=True, heartbeat=Beat(1, (ALL_REDUCE,)))
    found = watch.pass_(30)[-1]
    assert found.state == "silent"
    assert (
        found.cause == "nothing heard for 5 s, last seen in all_reduce #1234: dead, stopped, stuck or cut off" + IF_SLOW
    )


def test_a_call_that_does_not_move_is_reported_once_and_never_lost(watch: Watch) -> None:
    (stuck,) = watch.pass_(1000, packets=True, heartbeat=Beat(1, (CurrentCall(0, "barrier", 2, age=1.0), ALL_REDUCE)))
    assert (stuck.state, stuck.doing, stuck.is_loss) == ("stuck", ALL_REDUCE, False)
    assert stuck.cause == "alive, stuck in all_reduce #1234 for 6 s"
    assert stuck.since == 95.0
    (another,) = watch.pass_(10, packets=True, heartbeat=Beat(1, (CurrentCall(0, "barrier", 1235, age=9.0),)))
    assert another.cause == "alive, stuck in barrier #1235 for 9 s"
    (moved,) = watch.pass_(10, packets=True, heartbeat=Beat(1, (CurrentCall(0, "barrier", 1235, age=0.1),)))
    assert moved.state == "alive"


def test_what_a_peer_writes_about_its_call_is_cut_to_size(watch: Watch) -> None:
    (stuck,) = watch.pass_(1, packets=True, heartbeat=Beat(1, (CurrentCall(0, "\x1b[31m" + "x" * 5000, 1, age=9.0),)))
    assert len(stuck.cause) < 120
    assert stuck.cause.isprintable()


# ---------------------------------------------------------------- who is watched


def test_one_that_is_silent_hides_nobody_and_harms_nobody() -> None:
    watch = Watch(PEER, OTHER)
    found = watch.pass_(20, packets=True, heartbeat=Beat(1))
    assert [(each.node, each.state) for each in found] == [(OTHER, "silent")]


def test_who_is_new_has_a_whole_timeout_and_who_stays_is_not_forgotten(watch: Watch) -> None:
    watch.pass_(4)
    watch.detector.watch([PEER, OTHER], watch.now)
    assert [each.node for each in watch.pass_(2)] == [PEER]
    assert [each.node for each in watch.pass_(4)] == [OTHER]
    watch.detector.watch([OTHER], watch.now)
    assert watch.detector.watched == {OTHER}
    assert watch.detector.known(PEER, watch.now) is None


def test_nobody_to_watch_is_nothing_to_do(watch: Watch) -> None:
    watch.detector.watch([], watch.now)
    assert watch.detector.due(watch.now) is None
    assert watch.pass_(3) == []
    assert watch.sleep(1000) == []
    watch.come(packets=True, heartbeat=Beat(1))
    watch.detector.watch([PEER], watch.now)
    assert watch.detector.due(watch.now) == watch.now + INTERVAL


def test_what_is_known_of_a_node_can_be_asked(watch: Watch) -> None:
    heartbeat = Beat(3, (ALL_REDUCE,), "barrier #1233")
    watch.pass_(2, packets=True, heartbeat=heartbeat)
    watch.pass_(2, packets=True)
    watch.pass_(1)
    known = watch.detector.known(PEER, watch.now)
    assert known is not None
    assert (known.age, known.heartbeat, known.heartbeat_age, known.state) == (1.0, heartbeat, 3.0, "stuck")


def test_it_is_due_when_somebody_may_have_been_silent_for_long_enough(watch: Watch) -> None:
    watch.pass_(2, packets=True, heartbeat=Beat(1))
    watch.now += 0.5
    watch.come(packets=True, heartbeat=Beat(1))  # silent at 107.5
    watch.pass_(4.5)
    assert watch.detector.due(watch.now) == 107.5
    watch.now = 107.5
    assert [found.state for found in watch.detector.tick(watch.now)] == ["silent"]
    assert watch.detector.due(watch.now) == 108.5


# ---------------------------------------------------------------- a pause of our own


def test_who_was_suspended_does_not_take_the_others_for_dead(watch: Watch) -> None:
    watch.pass_(3, packets=True, heartbeat=Beat(1))
    assert watch.sleep(3600) == []
    assert watch.pass_(3) == []
    assert watch.pass_(60, packets=True, heartbeat=Beat(1)) == []


def test_silence_before_and_after_a_pause_counts(watch: Watch) -> None:
    watch.pass_(3, packets=True, heartbeat=Beat(1))
    watch.pass_(2)
    assert watch.sleep(100) == []
    assert [found.state for found in watch.pass_(5)] == ["silent"]


def test_who_was_at_its_limit_when_we_paused_has_an_interval_to_be_read(watch: Watch) -> None:
    watch.pass_(4.0)
    watch.sleep(0.9)
    assert watch.sleep(30) == []
    assert watch.pass_(0.9) == []
    watch.come(packets=True, heartbeat=Beat(1))
    assert watch.pass_(4) == []


def test_a_node_that_is_late_every_time_finds_who_is_silent_all_the_same(watch: Watch) -> None:
    found = [each for _ in range(20) for each in watch.sleep(3.5)]
    assert [each.state for each in found] == ["silent"]


def test_who_was_silent_before_a_pause_is_so_after_it(watch: Watch) -> None:
    watch.pass_(20)
    assert watch.sleep(100) == []
    assert watch.pass_(10) == []


def test_a_tick_that_is_a_little_late_is_no_pause() -> None:
    watch = Watch()
    watch.pass_(3)
    assert [found.state for found in watch.sleep(2.9)] == ["silent"]


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.booleans(), st.booleans()), max_size=60))
def test_nobody_is_lost_within_a_timeout_of_its_last_message(steps: list[tuple[float, bool, bool]]) -> None:
    watch = Watch()
    watch.come()  # what had come before it was watched: the first count shows nothing
    last_seen = watch.now
    for seconds, packet, heartbeat in steps:
        watch.now += seconds
        if packet or heartbeat:
            watch.come(packets=packet, heartbeat=Beat(1) if heartbeat else None)
            last_seen = watch.now
        lost = [found for found in watch.detector.tick(watch.now) if found.state == "silent"]
        assert not lost or watch.now - last_seen >= TIMEOUT
        due = watch.detector.due(watch.now)
        assert due is not None
        assert watch.now < due <= watch.now + INTERVAL


def test_a_node_that_runs_slowly_waits_longer_by_its_own_delay(watch: Watch) -> None:
    watch.pass_(3, packets=True, heartbeat=Beat(1))
    watch.detector.own_delay = 7.0
    assert watch.pass_(11.9) == []
    assert [found.state for found in watch.pass_(0.2)] == ["silent"]


def test_whoever_was_given_up_by_a_slow_node_is_notified_which_setting_to_raise(watch: Watch) -> None:
    (found,) = watch.pass_(30)
    assert found.cause.endswith("raise NEXAR_HEARTBEAT_TIMEOUT_SECS")


def test_a_node_whose_timers_are_punctual_has_no_delay() -> None:
    delay = OwnDelay()
    for second in range(20):
        delay.timer_ran(float(second), second + 0.01)
        delay.threads_used(second * 0.2, second * 0.05, float(second))
    assert delay.seconds == 0.0


def test_timers_that_run_late_again_and_again_are_a_delay_of_several_times_that() -> None:
    delay = OwnDelay()
    for second in range(20):
        delay.timer_ran(float(second), second + 0.5)
    assert delay.seconds == pytest.approx(5.0)


def test_threads_that_wait_for_a_cpu_longer_than_they_have_one_are_a_delay() -> None:
    delay = OwnDelay()
    for second in range(20):
        delay.threads_used(second * 0.1, second * 0.9, float(second))
    assert delay.seconds == pytest.approx(9.0)


def test_a_single_pause_is_forgotten_within_seconds() -> None:
    delay = OwnDelay()
    for second in range(5):
        delay.timer_ran(float(second), second + 0.001)
    delay.timer_ran(5.0, 65.0)
    assert 0.0 < delay.seconds <= LONGEST
    for second in range(66, 82):
        delay.timer_ran(float(second), second + 0.001)
    assert delay.seconds == 0.0


@pytest.mark.parametrize(("longest", "most"), [(4.0, 4.0), (1000.0, LONGEST)])
def test_the_delay_has_a_bound(longest: float, most: float) -> None:
    delay = OwnDelay(longest)
    for second in range(10):
        delay.timer_ran(100.0 * second, 100.0 * second + 99.0)
        delay.threads_used(second * 0.001, second * 50.0, 100.0 * second)
    assert delay.seconds == most


def test_totals_that_go_down_because_a_thread_ended_measure_nothing() -> None:
    delay = OwnDelay()
    delay.threads_used(1.0, 50.0, 0.0)
    delay.threads_used(1.1, 2.0, 1.0)
    assert delay.seconds == 0.0


@pytest.mark.parametrize(("timeout", "most"), [(3.0, 1.0), (60.0, LONGEST), (3600.0, LONGEST)])
def test_the_time_for_forming_extends_by_a_third_at_most(timeout: float, most: float) -> None:
    assert longest_extension(timeout) == pytest.approx(most)


WORLDS = [*range(1, 40), 1000, 4096]


@pytest.mark.parametrize("size", WORLDS)
def test_to_watch_and_to_be_watched_are_two_sides_of_one_thing(size: int) -> None:
    pairs = {(other, rank) for rank in range(size) for other in watchers(size, rank)}
    assert pairs == {(rank, other) for rank in range(size) for other in watched(size, rank)}


@pytest.mark.parametrize("size", WORLDS)
def test_everybody_is_watched_by_as_many_and_nobody_by_itself(size: int) -> None:
    many = min(size - 1, 3) if size > WATCH_ALL_UP_TO else size - 1
    for rank in range(size):
        found = watchers(size, rank)
        assert len(set(found) - {rank}) == len(found) == many
        assert all(0 <= other < size for other in found)
    assert set(Counter(other for rank in range(size) for other in watchers(size, rank)).values()) <= {many}


def test_in_a_large_world_one_watcher_is_far_away() -> None:
    assert watchers(100, 99) == (0, 1, 49)
    assert watched(100, 0) == (50, 98, 99)


@pytest.mark.parametrize("topology", ["k_regular:2", "k_regular:4", "hypercube"])
def test_in_a_sparse_world_neighbours_watch_one_another(topology: str) -> None:
    for size in (4, 8, 9, 33):
        for rank in range(size):
            assert watchers(size, rank, topology) == watched(size, rank, topology) == neighbors(topology, size, rank)
