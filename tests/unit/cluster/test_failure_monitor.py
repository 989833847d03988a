"""Every hint is examined: what turns out wrong harms nobody, what turns out right is reported once with its cause."""

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest

from nexar.cluster import failure_monitor as monitored
from nexar.cluster.control_loop import DialCancelled
from nexar.cluster.decisions.failure_detector import LivenessReport, PeerLiveness
from nexar.cluster.decisions.membership_events import Loss, LossKind, PeerLossFound, PeerReachable, ProbeFinished
from nexar.cluster.decisions.peering import PeerDirectory
from nexar.cluster.failure_monitor import LEFT, MAX_PROBES, FailureMonitor
from nexar.cluster.peer_probe import PingTable
from nexar.config import Config
from nexar.errors import LinkClosed, NexarError, PeerLost
from nexar.links.link import Link
from nexar.wire.control import MAX_CAUSE_CHARACTERS, Goodbye
from tests.losses import ended, left, silent
from tests.unit.cluster.decisions.test_peering import members
from tests.unit.cluster.virtual_loop import VirtualLoop

ME, PEER, OTHER, UNKNOWN = 7, 5, 9, 11
SILENT = "no answer for 1 s"
ENDED = "its process has ended (connection refused)"
KILLED = Loss(LossKind.LAUNCHER_REPORT, "it was killed by SIGKILL")


class FakeLink:
    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.failure: NexarError | None = None
        self.process_ended = False
        self.schemes: tuple[str, ...] = ("quic",)
        self.lost: list[str] = []

    def lose(self, cause: str) -> None:
        self.lost.append(cause)


class Scene:
    """Node and mesh, as far as they are asked; what the loop and the pool do waits until the test wants it."""

    def __init__(self) -> None:
        self.id = ME
        self.host = "another host than the members'"
        self.config = Config()
        self.dialer = self
        self.directory = PeerDirectory(ME, members(PEER, ME, OTHER))
        self.link = FakeLink(PEER)
        self.loop = VirtualLoop(100.0)
        self.tasks: deque[Callable[[], None]] = deque()
        """Of the dial pool."""
        self.unreachable: Loss | None = None
        """What a probe says."""
        self.refusal: NexarError | None = None
        """What a dial raises."""
        self.dialed = 0
        self.round: FakeLink | None = None
        """The link over others that can be made."""
        self.known: PeerLiveness | None = None
        """What the heartbeat knows."""
        self.deadlines: list[float] = []
        """Of probes."""
        self.patience: list[float] = []
        """Likewise: for a process that exists."""
        self.own_delay = 0.0
        self.reported: list[Any] = []
        self.noticed: list[tuple[int, str, str]] = []
        self.failure_monitor = FailureMonitor(
            cast(Any, self),
            cast(Any, self),
            PingTable(),
            control_loop=self.loop,
            report_event=self.reported.append,
            notify_users=lambda node, state, cause: self.noticed.append((node, state, cause)),
            liveness_of=lambda _: self.known,
            own_delay=lambda: self.own_delay,
        )

    def run_in_thread(self, task: Callable[[], None], priority: Any = None) -> None:
        self.tasks.append(task)

    def links(self) -> dict[int, FakeLink]:
        return {PEER: self.link}

    def find(self, node: int) -> FakeLink | None:
        return self.links().get(node)

    def relink(self, node: int, deadline: float) -> Link:
        self.dialed += 1
        if self.refusal is not None:
            raise self.refusal
        return cast(Link, self.link)

    dial = relink

    @property
    def relay_routes(self) -> "Scene":
        return self

    def detour(self, node: int) -> FakeLink | None:
        return self.round

    def probe(
        self,
        node: Any,
        member: Any,
        link: Any,
        pings: Any,
        *,
        deadline: float,
        finished: Callable[[Loss | None], None],
        patience: float,
        **_: Any,
    ) -> None:
        self.deadlines.append(deadline)
        self.patience.append(patience)
        self.loop.call_soon(lambda: finished(self.unreachable))

    @property
    def idle(self) -> bool:
        return not (self.tasks or self.loop._queue or self.failure_monitor._running_tasks)

    def work(self) -> None:
        while self.tasks or self.loop._queue:
            self.loop.step()
            if self.tasks:
                self.tasks.popleft()()

    def lose_link(self, cause: str = "connection reset") -> None:
        self.link.failure = PeerLost(node=PEER, cause=cause)
        self.failure_monitor.link_lost(cast(Link, self.link), self.link.failure)

    def say(self, goodbye: Goodbye) -> None:
        self.failure_monitor.goodbye_received(cast(Link, self.link), goodbye)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene()
    monkeypatch.setattr(monitored, "PeerProbe", made.probe)
    return made


# ---------------------------------------------------------------- hints


def test_a_lost_link_to_who_does_not_answer_is_a_loss_with_both_causes(scene: Scene) -> None:
    scene.unreachable = silent(SILENT)
    scene.lose_link()
    assert scene.reported == []  # not before it was looked into
    scene.work()
    assert scene.reported == [PeerLossFound(PEER, silent(f"connection reset; {SILENT}"))]
    assert scene.noticed == [(PEER, "lost", f"connection reset; {SILENT}")]
    assert scene.dialed == 0


def test_a_lost_link_to_who_answers_is_made_anew_and_nobody_is_lost(scene: Scene) -> None:
    scene.lose_link()
    scene.work()
    assert scene.dialed == 1
    assert scene.reported == [PeerReachable(PEER, severed=True)]
    assert scene.noticed == [(PEER, "back", "its link was lost and replaced")]


def test_who_does_not_answer_over_other_nodes_is_dialed_for_perhaps_it_is_they_who_do_not(scene: Scene) -> None:
    scene.link.schemes = ("relay",)
    scene.unreachable = silent(SILENT)
    scene.failure_monitor.liveness_ended(PEER, "a hint")
    scene.work()
    assert (scene.reported, scene.dialed) == ([], 1)
    scene.refusal = PeerLost(node=PEER, cause="refused")
    scene.failure_monitor.liveness_ended(PEER, "a hint")
    scene.work()
    assert scene.reported == [PeerLossFound(PEER, silent("a hint; refused"))]


def test_who_is_lost_and_disputed_is_reached_over_others_from_now_on(scene: Scene) -> None:
    scene.unreachable = silent(SILENT)
    scene.lose_link()
    scene.work()
    scene.reported.clear()
    scene.failure_monitor.probe(PEER)
    scene.work()
    assert scene.reported == [ProbeFinished(PEER, silent(SILENT))]  # nobody to go over
    scene.reported.clear()
    scene.round = FakeLink(PEER)
    scene.failure_monitor.probe(PEER)
    scene.work()
    assert scene.reported == [ProbeFinished(PEER, silent(SILENT))]  # nor an answer over others
    assert scene.round.lost == [f"it does not answer over other nodes: {SILENT}"]
    scene.reported.clear()
    scene.unreachable = None
    scene.failure_monitor.probe(PEER)
    scene.work()
    assert scene.reported == [PeerReachable(PEER, severed=True), ProbeFinished(PEER, None)]
    assert scene.noticed[-1] == (PEER, "back", "it is reachable over other nodes")


def test_a_member_that_others_report_loses_only_its_link_and_only_if_it_does_not_answer_there(scene: Scene) -> None:
    scene.failure_monitor.probe_neighbour(PEER)
    scene.work()
    assert scene.link.lost == []
    scene.unreachable = silent(SILENT)
    scene.failure_monitor.probe_neighbour(PEER)
    scene.work()
    assert scene.link.lost == [SILENT]
    assert scene.reported == []  # what becomes of the lost link is looked into like that of any other
    assert 100.0 < scene.deadlines[-1] < 101.0  # sooner than the member gives up


def test_reports_about_unknown_nodes_and_about_nodes_without_a_link_are_ignored(scene: Scene) -> None:
    for node in (UNKNOWN, OTHER):
        scene.failure_monitor.probe_neighbour(node)
    scene.failure_monitor.close()
    scene.failure_monitor.probe_neighbour(PEER)
    assert scene.idle


def test_who_answers_and_cannot_be_dialed_is_lost(scene: Scene) -> None:
    scene.refusal = PeerLost(node=PEER, cause="a firewall")
    scene.lose_link()
    scene.work()
    assert scene.reported == [PeerLossFound(PEER, silent("connection reset; a firewall"))]


def test_nobody_dials_whose_process_has_ended_however_it_was_reached(scene: Scene) -> None:
    scene.link.schemes = ("relay",)
    scene.unreachable = ended(ENDED)
    scene.failure_monitor.route_lost(PEER, "no way is left")
    scene.work()
    assert scene.reported == [PeerLossFound(PEER, ended(f"no way is left; {ENDED}"))]
    assert scene.dialed == 0
    assert scene.failure_monitor.has_left(PEER)


def test_who_does_not_answer_is_dialed_although_the_words_say_that_its_process_has_ended(scene: Scene) -> None:
    scene.link.schemes = ("relay",)
    scene.unreachable = silent(ENDED)
    scene.failure_monitor.route_lost(PEER, "no way is left")
    scene.work()
    assert (scene.reported, scene.dialed) == ([], 1)


def test_who_is_cut_off_and_answers_is_not_lost(scene: Scene) -> None:
    scene.failure_monitor.route_lost(PEER, "no way is left")
    scene.work()
    assert scene.reported == []
    assert not scene.failure_monitor.has_left(PEER)


def test_a_hint_about_who_answers_on_its_link_changes_nothing(scene: Scene) -> None:
    scene.failure_monitor.liveness_ended(PEER, "its death line ended")
    scene.failure_monitor.report_unreachable(PEER, "somebody could not send")
    scene.work()
    assert (scene.reported, scene.noticed, scene.dialed) == ([], [], 0)


def test_the_report_of_a_launcher_is_checked_and_then_is_the_cause(scene: Scene) -> None:
    scene.failure_monitor.report_dead(PEER, KILLED)
    scene.work()
    assert scene.reported == []  # it answers: another process of that number, say
    scene.unreachable = ended("connection refused")
    scene.failure_monitor.liveness_ended(PEER, "its death line ended")
    scene.work()
    assert scene.reported == [PeerLossFound(PEER, KILLED)]


def test_a_launchers_report_is_the_cause_by_its_kind_whatever_its_words(scene: Scene) -> None:
    words = "its connection to the seed broke: reset"
    scene.unreachable = silent(SILENT)
    scene.failure_monitor.report_dead(PEER, Loss(LossKind.LAUNCHER_REPORT, words))
    scene.failure_monitor.report_dead(PEER, Loss(LossKind.SEED_CONNECTION_BROKEN, "it was killed by SIGKILL"))
    scene.work()
    assert scene.reported == [PeerLossFound(PEER, Loss(LossKind.LAUNCHER_REPORT, words))]


def test_the_seeds_report_is_a_hint_by_its_kind_whatever_its_words(scene: Scene) -> None:
    scene.unreachable = silent(SILENT)
    scene.failure_monitor.report_dead(PEER, Loss(LossKind.SEED_CONNECTION_BROKEN, "it was killed by SIGKILL"))
    scene.work()
    assert scene.reported == [PeerLossFound(PEER, silent(f"it was killed by SIGKILL; {SILENT}"))]


def test_many_hints_at_once_are_one_examination(scene: Scene) -> None:
    scene.unreachable = silent(SILENT)
    scene.lose_link()
    scene.failure_monitor.liveness_ended(PEER, "its death line ended")
    scene.failure_monitor.report_unreachable(PEER, "somebody could not send")
    assert scene.failure_monitor._running_tasks == 1
    scene.work()
    assert scene.reported == [PeerLossFound(PEER, silent(f"connection reset; {SILENT}"))]
    assert len(scene.deadlines) == 1


def test_who_is_known_to_be_lost_is_not_probed_again_because_it_is_needed(scene: Scene) -> None:
    scene.unreachable = silent(SILENT)
    scene.lose_link()
    scene.work()
    scene.failure_monitor.report_unreachable(PEER, "somebody could not send")
    scene.work()
    assert (len(scene.reported), len(scene.deadlines)) == (1, 1)


def test_a_launcher_s_report_of_a_known_loss_is_the_cause_without_another_probe(scene: Scene) -> None:
    scene.unreachable = silent(SILENT)
    scene.lose_link()
    scene.work()
    scene.failure_monitor.report_dead(PEER, KILLED)
    scene.work()
    assert scene.reported[1:] == [PeerLossFound(PEER, KILLED)]
    assert len(scene.deadlines) == len(scene.noticed) == 1


def test_a_member_is_examined_until_the_finding_is_reported(scene: Scene) -> None:
    scene.unreachable = silent(SILENT)
    reported_while: list[bool] = []
    scene.failure_monitor._report_event = lambda _: reported_while.append(
        scene.failure_monitor.is_investigating([OTHER, PEER])
    )
    scene.lose_link()
    assert not scene.failure_monitor.is_investigating([OTHER])
    scene.work()
    assert (reported_while, scene.failure_monitor.is_investigating([PEER])) == ([True], False)


def test_nobody_looks_into_unauthenticated_peers_or_itself(scene: Scene) -> None:
    scene.failure_monitor.liveness_ended(UNKNOWN, "gone")
    scene.failure_monitor.report_dead(ME, KILLED)
    assert scene.idle


def test_what_waits_for_a_lost_member_ends_now_and_the_end_of_its_link_is_no_news(scene: Scene) -> None:
    scene.unreachable = silent(SILENT)
    scene.failure_monitor.liveness_ended(PEER, "its death line ended")
    scene.work()
    assert scene.link.lost == [f"its death line ended; {SILENT}"]
    scene.lose_link()
    assert scene.idle
    assert len(scene.reported) == 1


def test_users_learn_of_a_loss_once_however_many_report_it_and_again_when_it_was_back(scene: Scene) -> None:
    scene.unreachable = silent(SILENT)
    for _ in range(2):
        scene.failure_monitor.liveness_ended(PEER, "its death line ended")
        scene.work()
        scene.failure_monitor.report_dead(PEER, KILLED)
        scene.work()
        assert [state for _, state, _ in scene.noticed] == ["lost"]
        scene.noticed.clear()
        scene.failure_monitor._report_reachable(PEER)
    scene.failure_monitor.report_unreachable(UNKNOWN, "it was a member when somebody asked")
    scene.failure_monitor._lose(UNKNOWN, silent("it is no longer a member"))
    assert scene.noticed == []


# ---------------------------------------------------------------- goodbyes


def test_who_raised_is_lost_at_once_with_its_traceback(scene: Scene) -> None:
    scene.say(Goodbye("ValueError: no data", traceback="Traceback …\nValueError: no data"))
    (loss,) = scene.reported
    assert loss.node == PEER
    assert loss.loss.cause == "it raised an exception and left:\nTraceback …\nValueError: no data"
    assert not loss.willing


def test_of_a_long_traceback_the_end_is_kept(scene: Scene) -> None:
    scene.say(Goodbye("ValueError", traceback="x" * MAX_CAUSE_CHARACTERS + "ValueError: the end"))
    (loss,) = scene.reported
    assert len(loss.loss.cause) == MAX_CAUSE_CHARACTERS
    assert loss.loss.cause.startswith("it raised an exception and left:\n")
    assert loss.loss.cause.endswith("ValueError: the end")


def test_who_simply_leaves_is_gone_when_its_link_ends_and_not_before(scene: Scene) -> None:
    scene.say(Goodbye(LEFT))
    assert scene.reported == []
    scene.failure_monitor.link_lost(cast(Link, scene.link), LinkClosed(node=PEER))
    assert scene.reported == [PeerLossFound(PEER, left(LEFT), willing=True)]
    assert scene.noticed == [(PEER, "left", LEFT)]
    assert scene.idle


def test_whatever_hints_at_who_said_goodbye_it_has_left_as_it_said(scene: Scene) -> None:
    scene.unreachable = silent(SILENT)
    scene.say(Goodbye(LEFT))
    scene.failure_monitor.liveness_ended(PEER, "its death line ended")
    scene.work()
    assert scene.reported == [PeerLossFound(PEER, left(LEFT), willing=True)]
    assert scene.noticed == [(PEER, "left", LEFT)]


def test_who_is_needed_after_it_left_is_lost_like_anybody_else(scene: Scene) -> None:
    scene.say(Goodbye(LEFT))
    scene.failure_monitor.report_unreachable(PEER, "the link was lost")
    assert scene.reported == [PeerLossFound(PEER, left(LEFT))]


def test_who_is_no_member_any_more_is_forgotten(scene: Scene) -> None:
    scene.say(Goodbye(LEFT))
    scene.failure_monitor.report_dead(PEER, KILLED)
    scene.failure_monitor.adopt(members(ME, OTHER, epoch=2))
    scene.failure_monitor.adopt(members(PEER, ME, OTHER, epoch=3))  # another life of that number
    scene.work()
    assert scene.reported == []  # it answers
    scene.failure_monitor.report_unreachable(PEER, "somebody could not send")
    scene.work()
    assert scene.reported == []  # it answers


# ---------------------------------------------------------------- findings


def test_silence_is_a_loss_whatever_the_link_looks_like(scene: Scene) -> None:
    scene.failure_monitor.liveness_changed(LivenessReport(PEER, "silent", 0.0, None, "nothing heard for 5 s"))
    assert scene.reported == [PeerLossFound(PEER, silent("nothing heard for 5 s"))]


def test_who_is_stuck_is_reported_and_stays(scene: Scene) -> None:
    scene.failure_monitor.liveness_changed(LivenessReport(PEER, "stuck", 0.0, None, "in all_reduce #12 for 9 s"))
    assert scene.reported == []
    assert scene.noticed == [(PEER, "stuck", "in all_reduce #12 for 9 s")]
    scene.failure_monitor.liveness_changed(LivenessReport(PEER, "alive", 0.0, None, "it goes on"))
    assert scene.reported == [PeerReachable(PEER)]
    assert scene.noticed[1:] == [(PEER, "back", "it goes on")]


# ---------------------------------------------------------------- probes


@pytest.mark.parametrize("answer", [None, silent(SILENT)])
def test_a_probe_is_answered_aside(scene: Scene, answer: Loss | None) -> None:
    scene.unreachable = answer
    scene.failure_monitor.probe(PEER)
    assert scene.reported == []
    scene.work()
    assert scene.reported == [ProbeFinished(PEER, answer)]


def test_a_lost_member_that_answers_a_probe_is_back_and_that_is_reported_once(scene: Scene) -> None:
    scene.failure_monitor.liveness_changed(LivenessReport(PEER, "silent", 0.0, None, "nothing heard for 5 s"))
    scene.reported.clear()
    scene.noticed.clear()
    scene.failure_monitor.probe(PEER)
    scene.work()
    assert scene.reported == [PeerReachable(PEER), ProbeFinished(PEER, None)]
    assert scene.noticed == [(PEER, "back", "it answers again")]
    scene.failure_monitor.probe(PEER)
    scene.failure_monitor.liveness_changed(LivenessReport(PEER, "alive", 0.0, None, "it is heard again"))
    scene.work()
    assert scene.reported[2:] == [PeerReachable(PEER), ProbeFinished(PEER, None)]
    assert len(scene.noticed) == 1
    for state in ("silent", "stuck", "alive"):
        scene.failure_monitor.liveness_changed(LivenessReport(PEER, state, 0.0, None, state))
    assert [state for _, state, _ in scene.noticed] == ["back", "lost", "stuck", "back"]


def test_an_answer_says_nothing_about_a_loss_that_was_found_after_the_probe_began(scene: Scene) -> None:
    scene.failure_monitor.liveness_ended(PEER, "its death line ended")
    scene.failure_monitor.probe(PEER)
    scene.failure_monitor.liveness_changed(LivenessReport(PEER, "hung", 0.0, None, "no beat for 60 s"))
    scene.work()
    assert scene.reported[1:] == [ProbeFinished(PEER, None)]
    assert [state for _, state, _ in scene.noticed] == ["lost"]
    assert scene.failure_monitor.has_left(PEER)


def test_a_member_that_raised_and_still_answers_is_not_back(scene: Scene) -> None:
    scene.say(Goodbye("ValueError: no data", traceback="ValueError: no data"))
    scene.failure_monitor.probe(PEER)
    scene.work()
    assert scene.reported[1:] == [ProbeFinished(PEER, None)]
    assert [state for _, state, _ in scene.noticed] == ["lost"]


def test_who_is_no_member_cannot_be_reached(scene: Scene) -> None:
    scene.failure_monitor.probe(UNKNOWN)
    scene.work()
    assert scene.reported == [ProbeFinished(UNKNOWN, silent("it is no longer a member"))]


def test_a_first_link_that_a_probe_opens_is_not_called_a_severed_one(scene: Scene) -> None:
    scene.failure_monitor.probe(OTHER)
    scene.work()
    assert scene.dialed == 1
    assert scene.reported == [ProbeFinished(OTHER, None)]
    assert scene.noticed == []


def test_once_closed_nothing_is_looked_into(scene: Scene) -> None:
    scene.failure_monitor.close()
    scene.failure_monitor.close()
    scene.lose_link()
    scene.failure_monitor.probe(PEER)
    assert scene.idle


def test_a_voter_agrees_that_a_node_hangs_although_it_has_not_noticed_yet_itself(scene: Scene) -> None:
    config = scene.config
    scene.known = PeerLiveness(age=0.1, heartbeat=None, heartbeat_age=config.stuck_timeout - 1.0, state="stuck")
    scene.failure_monitor.probe(PEER)
    scene.work()
    (reported,) = scene.reported
    assert isinstance(reported, ProbeFinished)
    assert reported.loss is not None
    assert "no heartbeat for 59 s" in reported.loss.text


# ---------------------------------------------------------------- starvation


def test_a_node_that_runs_slowly_gives_everybody_more_time(scene: Scene) -> None:
    scene.own_delay = 12.0
    scene.failure_monitor.liveness_ended(PEER, "its connection ended")
    scene.work()
    assert scene.deadlines == [100.0 + 13.0]


def test_a_process_that_exists_has_as_much_time_as_its_watchers_give_it_less_its_silence(scene: Scene) -> None:
    scene.failure_monitor.liveness_ended(PEER, "its connection ended")
    scene.known = PeerLiveness(age=3.0, heartbeat=None, heartbeat_age=3.0, state="alive")
    scene.work()
    scene.failure_monitor.liveness_ended(PEER, "its connection ended")
    scene.known = PeerLiveness(age=300.0, heartbeat=None, heartbeat_age=3.0, state="alive")
    scene.work()
    assert scene.patience == [1.0, 0.0]


def test_only_so_many_are_looked_into_at_a_time_and_all_in_the_end(scene: Scene) -> None:
    many = range(100, 100 + 3 * MAX_PROBES)
    scene.directory = PeerDirectory(ME, members(ME, *many))
    for node in many:
        scene.failure_monitor.liveness_ended(node, "its connection ended")
    assert scene.failure_monitor._running_tasks == MAX_PROBES
    scene.loop.step()
    assert len(scene.deadlines) == MAX_PROBES
    scene.unreachable = ended(ENDED)
    scene.work()
    assert [event.node for event in scene.reported] == list(many)
    assert scene.idle
    scene.failure_monitor.probe(many[0])
    assert scene.failure_monitor._running_tasks == 1


def test_a_node_whose_probe_raised_can_be_probed_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Loss | None:
        raise ZeroDivisionError

    monkeypatch.setattr(monitored, "PeerProbe", fail)
    scene.failure_monitor.probe(PEER)
    scene.work()
    scene.reported.clear()
    monkeypatch.setattr(monitored, "PeerProbe", scene.probe)
    scene.failure_monitor.probe(PEER)
    scene.work()
    assert scene.reported == [ProbeFinished(PEER, None)]


def test_a_node_that_is_asked_about_again_before_the_answer_is_probed_once(scene: Scene) -> None:
    scene.failure_monitor.probe(PEER)
    scene.failure_monitor.probe(PEER)
    scene.work()
    assert scene.reported == [ProbeFinished(PEER, None)]
    scene.failure_monitor.probe(PEER)
    scene.work()
    assert scene.reported == [ProbeFinished(PEER, None)] * 2


# ---------------------------------------------------------------- probes that raise


def raising(*_: object, **__: object) -> Loss | None:
    raise TypeError("an address that is a number")


def test_a_probe_that_raises_says_that_this_member_cannot_be_reached_and_others_are_probed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitored, "PeerProbe", raising)
    scene.failure_monitor.probe(PEER)
    scene.failure_monitor.probe(OTHER)
    scene.work()
    loss = silent("it cannot be probed: TypeError: an address that is a number")
    assert scene.reported == [ProbeFinished(PEER, loss), ProbeFinished(OTHER, loss)]
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    scene.reported.clear()
    scene.failure_monitor.probe(PEER)
    scene.work()
    assert scene.reported == [ProbeFinished(PEER, loss)], "it may be asked again"


def test_a_hint_whose_probe_raises_is_concluded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitored, "PeerProbe", raising)
    scene.failure_monitor.report_unreachable(PEER, SILENT)
    scene.work()
    (lost,) = scene.reported
    assert isinstance(lost, PeerLossFound)
    assert lost.loss.text == f"{SILENT}; it cannot be probed: TypeError: an address that is a number"
    assert not scene.failure_monitor.is_investigating([PEER])


def test_a_report_or_a_dial_that_raises_keeps_no_place(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scene.failure_monitor, "_notify_users", raising)
    scene.lose_link()  # it is redialed, and the user would be told
    scene.unreachable = silent(SILENT)
    scene.failure_monitor.liveness_ended(OTHER, "its connection ended")
    scene.work()
    assert scene.idle
    assert "an address that is a number" in caplog.text
    assert not scene.failure_monitor.is_investigating([PEER, OTHER])


def test_a_dial_that_the_closing_node_cancels_is_no_loss(scene: Scene) -> None:
    scene.refusal = cast(Any, DialCancelled())
    scene.lose_link()
    scene.work()
    assert (scene.reported, scene.idle) == ([], True)


def test_a_node_that_closes_begins_no_probe_that_waits(scene: Scene) -> None:
    scene.lose_link()
    scene.failure_monitor.close()
    scene.work()
    assert (scene.deadlines, scene.reported, scene.idle) == ([], [], True)


def test_a_loop_that_is_closed_leaves_no_place_taken(scene: Scene) -> None:
    scene.loop.close()
    scene.lose_link()
    assert scene.idle


# -- processes of this host


def test_a_process_of_this_host_that_ended_is_lost_at_once_without_the_loop(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitored, "ended_on_this_host", lambda _node, _member: ended(ENDED))
    scene.lose_link()
    assert not scene.loop._queue
    assert scene.reported == [PeerLossFound(PEER, ended(f"connection reset; {ENDED}"))]
    assert not scene.failure_monitor.is_investigating([PEER])
    scene.failure_monitor.probe(PEER)
    assert scene.reported[1:] == [ProbeFinished(PEER, ended(ENDED))]


def test_a_process_whose_end_the_kernel_reports_is_lost_at_once_though_its_port_is_open(scene: Scene) -> None:
    scene.link.process_ended = True
    scene.lose_link("its process has ended")
    assert not scene.loop._queue
    assert scene.reported == [PeerLossFound(PEER, ended("its process has ended"))]
    scene.failure_monitor.probe(PEER)
    assert scene.reported[1:] == [ProbeFinished(PEER, ended("its process has ended"))]


def test_a_process_that_ends_while_it_is_probed_is_not_dialed(scene: Scene) -> None:
    scene.failure_monitor.probe(PEER)
    scene.link.process_ended = True
    scene.lose_link("its process has ended")
    scene.work()
    assert scene.reported == [
        PeerLossFound(PEER, ended("its process has ended")),
        ProbeFinished(PEER, ended("its process has ended")),
    ]
    assert scene.dialed == 0


def test_a_goodbye_explains_the_end_of_a_process(scene: Scene) -> None:
    scene.say(Goodbye(reason="it left"))
    scene.link.process_ended = True
    scene.lose_link("its process has ended")
    assert [event.willing for event in scene.reported] == [True]


def test_a_member_with_a_working_link_is_asked_though_its_port_refuses(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitored, "ended_on_this_host", lambda _node, _member: ended(ENDED))
    scene.failure_monitor.probe(PEER)
    scene.work()
    assert scene.reported == [ProbeFinished(PEER, None)]
