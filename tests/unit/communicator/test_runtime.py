"""A node as a member: what it reports to the others, what it learns of them, and what its communicators do then."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nexar.cluster.control_loop import CancelToken
from nexar.cluster.decisions.membership_events import Loss, LossKind, PeerLossFound, SelfExpelled
from nexar.cluster.dialing import Dialer
from nexar.cluster.membership import Membership
from nexar.communicator import runtime as runtime_scene
from nexar.communicator.communicator import Communicator
from nexar.communicator.events import FailureEvent
from nexar.communicator.runtime import NodeRuntime
from nexar.config import Config
from nexar.errors import Expelled, JoinRefused, MembershipChanged, NoQuorum, PeerLost
from nexar.wire.control import MAX_CAUSE_CHARACTERS, Goodbye
from tests.ranks import EVENT_TIMEOUT, on_every
from tests.unit.cluster.decisions.voters import a_member
from tests.unit.cluster.memory_mesh import eventually
from tests.unit.communicator.worlds import World, raised, waiting

# ---------------------------------------------------------------- leaving


def test_who_raised_says_so_with_its_traceback_and_of_a_long_one_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Goodbye] = []
    monkeypatch.setattr(runtime_scene, "send_or_log", lambda _, message: said.append(message))
    (left, *_) = world(2)
    try:
        raise ValueError("x" * 2 * MAX_CAUSE_CHARACTERS + " the end")
    except ValueError as error:
        left._runtime.send_goodbye(error, error.__traceback__)
    left._runtime.send_goodbye()
    raised_one, plain = said
    assert raised_one.traceback is not None
    assert len(raised_one.traceback) == MAX_CAUSE_CHARACTERS
    assert raised_one.traceback.endswith(" the end\n")
    assert raised_one.reason.startswith("ValueError: xxx")
    assert plain == Goodbye("it left")


def test_who_leaves_is_reported_as_an_event_and_who_raised_as_lost(world: World) -> None:
    ranks = world(4)
    events: list[FailureEvent] = []
    with ranks[0].failure_events(events.append):
        ranks[3].close()
        eventually(lambda: events, "it left")
        with pytest.raises(ZeroDivisionError), ranks[2]:
            raise ZeroDivisionError("a step too far")
        eventually(lambda: any(event.state == "lost" for event in events), "it raised")
    assert [(event.rank, event.state, event.epoch) for event in events[:2]] == [(3, "left", 1), (2, "lost", 1)]
    assert "a step too far" in events[1].cause


# ---------------------------------------------------------------- losing


def test_of_two_one_goes_on_because_there_is_a_witness(world: World) -> None:
    left, right = world(2)
    right.close()
    change = raised(lambda: left.recv(source=1, timeout=EVENT_TIMEOUT))
    assert isinstance(change, MembershipChanged)
    assert change.communicator.size == 1
    assert left._runtime.is_gone(right._runtime.node.id)


def test_a_change_ends_calls_then_closes_links_then_fails_what_waits_for_the_lost_and_then_builds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = world(3)
    runtime, generation = ranks[0]._runtime, ranks[0]._generation
    order: list[str] = []

    def recorded(owner: object, name: str) -> None:
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(f"{name}, interrupted: {generation.interrupted}")
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (generation, "interrupt"),
        (runtime.mesh, "adopt"),
        (runtime, "membership_adopted"),
        (runtime.successors._builder, "lose"),
        (runtime.successors._builder, "start"),
    ):
        recorded(owner, name)
    with pytest.raises(ZeroDivisionError), ranks[2]:
        raise ZeroDivisionError("a step too far")
    assert isinstance(raised(ranks[0].barrier), MembershipChanged)
    assert order == ["interrupt, interrupted: False"] + [
        f"{name}, interrupted: True" for name in ("adopt", "membership_adopted", "lose", "start")
    ]


def test_what_a_change_ends_is_ended_before_new_dials_begin(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = world(2)
    runtime, order = ranks[0]._runtime, list[str]()
    monkeypatch.setattr(runtime.agreements, "voters_removed", lambda _: order.append("voters removed"))
    monkeypatch.setattr(runtime, "dial_watchers", lambda: order.append("watchers dialed"))
    ranks[1].close()
    eventually(lambda: order == ["voters removed", "watchers dialed"], "the change")


def test_watchers_that_no_thread_can_dial_are_logged_and_the_next_change_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    members = tuple(a_member(node) for node in range(1, 12))
    node = SimpleNamespace(id=1, config=Config(), dialer=Dialer({}, CancelToken()))
    service = SimpleNamespace(membership=Membership(b"c" * 16, 1, members))
    runtime = SimpleNamespace(node=node, membership_service=service, heartbeat=object(), _link=lambda _: None)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", cannot)
        NodeRuntime.dial_watchers(cast(Any, runtime))
    assert "the watching nodes are not dialed: can't start new thread" in caplog.text
    NodeRuntime.dial_watchers(cast(Any, runtime))
    node.dialer.close()


def test_the_seed_is_checked_while_a_loss_is_not_decided(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = world(2, recovery_policy="manual")
    runtime, asked = left._runtime, list[float]()
    monkeypatch.setattr(runtime, "_seed", runtime._seed._replace(ping=lambda timeout, _: asked.append(timeout)))
    runtime._check_seed(0.0)
    assert asked == []
    runtime._report(PeerLossFound(right._runtime.node.id, Loss(LossKind.NO_ANSWER, "silence")))
    eventually(lambda: asked, "a ping")


def test_where_everybody_aborts_one_loss_ends_all_with_its_cause(world: World) -> None:
    ranks = world(3, recovery_policy="abort")
    ends = [waiting(comm) for comm in ranks[1:]]
    with pytest.raises(ZeroDivisionError), ranks[0]:
        raise ZeroDivisionError("a step too far")
    for error in (end() for end in ends):
        assert isinstance(error, PeerLost)
        assert error.rank == 0
        assert "a step too far" in error.cause
        assert "the policy is abort" in str(error)
    assert isinstance(raised(ranks[1].barrier), PeerLost)


def test_who_was_expelled_is_notified_since_when_and_why(world: World, caplog: pytest.LogCaptureFixture) -> None:
    ranks = world(3)
    ranks[2]._runtime.expelled(5, "it was silent")
    ranks[2]._runtime.expelled(5, "so says another one")
    error = raised(ranks[2].barrier)
    assert isinstance(error, Expelled)
    assert (error.epoch, error.reason) == (5, "it was silent")
    assert [record.levelname for record in caplog.records if "expelled in epoch 5" in record.message] == ["WARNING"]


def test_the_seed_may_say_that_this_node_was_expelled_or_that_it_wants_nothing_to_do_with_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = world(3)
    ranks[2]._runtime.seed_refused(JoinRefused(reason="expelled: epoch 7 is what this text says"))
    ranks[2]._generation.outcome.check()
    assert "the seed refused this node, which continues without it" in caplog.text
    ranks[2]._runtime.seed_refused(JoinRefused(reason="it was silent", expelled=5))
    error = raised(ranks[2].barrier)
    assert isinstance(error, Expelled)
    assert error.epoch == 5


def test_who_asked_to_leave_is_not_warned(world: World, caplog: pytest.LogCaptureFixture) -> None:
    ranks = world(2)
    ranks[1]._runtime.put(SelfExpelled(2, "as agreed", willing=True))
    assert ranks[1]._runtime.has_left
    assert "expelled" not in caplog.text


# ---------------------------------------------------------------- what it does


def test_it_says_which_calls_it_is_in_and_which_it_finished_last(world: World) -> None:
    left, right = world(2)
    runtime = left._runtime
    assert runtime.doing() == ((), "")
    on_every([left, right], Communicator.barrier)
    assert runtime.doing()[1].startswith("barrier #0")
    request = left.start.all_reduce(1.0)
    (doing,) = runtime.doing()[0]
    assert (doing.communicator, doing.operation, doing.sequence) == (0, "all_reduce", 1)
    right.all_reduce(1.0)
    assert request.wait(EVENT_TIMEOUT) == 2.0


# ---------------------------------------------------------------- going on


def test_a_successor_that_nobody_needs_has_the_same_members(world: World) -> None:
    ranks = world(3)
    following = on_every(ranks, lambda comm: comm.shrink(timeout=EVENT_TIMEOUT))
    assert [(comm.rank, comm.size, comm.epoch) for comm in following] == [(0, 3, 2), (1, 3, 2), (2, 3, 2)]
    assert on_every(following, lambda comm: comm.all_reduce(1)) == [3] * 3


def test_where_there_is_no_majority_there_is_no_successor(world: World) -> None:
    ranks = world(3, recovery_policy="manual", recovery_timeout=2.0)
    for comm in ranks[1:]:
        comm.close()
    assert isinstance(raised(lambda: ranks[0].recv(source=1, timeout=EVENT_TIMEOUT)), PeerLost)
    error = raised(ranks[0].shrink)
    assert isinstance(error, NoQuorum)
    assert list(error.alive) == [0]


def test_who_closes_waits_for_no_dial(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = world(1)
    runtime = alone._runtime
    recalled: list[bool] = []
    close = runtime.successors.close
    monkeypatch.setattr(
        runtime.successors, "close", lambda: (recalled.append(runtime.node.cancel_token.is_cancelled), close())
    )
    runtime.close()
    assert recalled == [True]
