"""Checkpoints, in a world of threads: nobody comes in there, but everything else is as everywhere."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import pytest

from nexar.cluster.membership import Member
from nexar.communicator import elastic_methods
from nexar.communicator.communicator import Communicator
from nexar.communicator.elastic_methods import Checkpoint
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import (
    Cancelled,
    CollectiveTimeout,
    Expelled,
    MembershipChanged,
    NexarError,
    OperationTimeout,
    UsageError,
)
from tests.ranks import on_every

NOBODY = Member(77, "nowhere", bytes(32), {"memory": ("nobody",)})


@pytest.fixture
def three() -> Iterator[list[Communicator]]:
    with local_communicators(3, Config()) as made:
        yield made


def checkpoints(world: list[Communicator], state: Callable[[], Any] | None = None) -> list[Checkpoint | None]:
    return on_every(world, lambda comm: comm.checkpoint(state))


def pretend_waiting(comm: Communicator) -> None:
    comm._runtime.seed_reported_waiting((NOBODY,))


def test_without_a_request_there_is_none_and_nobody_is_asked_for_the_state(three: list[Communicator]) -> None:
    asked: list[str] = []
    assert checkpoints(three, lambda: asked.append("state")) == [None] * 3
    assert asked == []
    assert [comm.state for comm in three] == [None] * 3
    assert on_every(three, lambda comm: comm.all_reduce(1)) == [3] * 3


def test_who_leaves_is_out_and_the_others_have_the_successor(three: list[Communicator]) -> None:
    three[0].leave()
    first, *rest = checkpoints(three)
    assert first == Checkpoint(None, (), {0: "it wanted to leave"})
    goes_on = [change.communicator for change in rest if change is not None and change.communicator is not None]
    assert [(comm.rank, comm.size, comm.epoch) for comm in goes_on] == [(0, 2, 2), (1, 2, 2)]
    assert [change.left for change in rest if change is not None] == [{0: "it wanted to leave"}] * 2
    assert on_every(goes_on, lambda comm: comm.all_reduce(1)) == [2, 2]
    with pytest.raises(MembershipChanged):
        three[1].barrier()


def test_who_left_learns_it_at_its_next_checkpoint_if_the_first_was_interrupted(
    three: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaver = three[0]
    apply_plan = leaver._apply_plan

    def interrupted(*facts: Any) -> NoReturn:
        with pytest.raises(Expelled):
            apply_plan(*facts)
        raise KeyboardInterrupt

    monkeypatch.setattr(leaver, "_apply_plan", interrupted)
    leaver.leave()

    def attempt(comm: Communicator) -> Checkpoint | None:
        if comm is not leaver:
            return comm.checkpoint()
        with pytest.raises(KeyboardInterrupt):
            comm.checkpoint()
        return None

    on_every(three, attempt)
    assert leaver.checkpoint() == Checkpoint(None, (), {0: "it wanted to leave"})
    with pytest.raises(Expelled):
        leaver.checkpoint()


def test_a_rank_can_be_asked_to_go_by_another(three: list[Communicator]) -> None:
    three[0].remove(2, "it is slow")
    changes = checkpoints(three)
    assert changes[2] == Checkpoint(None, (), {2: "rank 0 asked it to leave: it is slow"})
    successors = [change.communicator for change in changes[:2] if change is not None]
    assert checkpoints(successors) == [None, None]  # it is not asked again


def test_when_all_want_to_go_the_last_stays() -> None:
    with local_communicators(2, Config()) as world:
        for comm in world:
            comm.leave()
        gone, stays = checkpoints(world)
        assert gone is not None
        assert gone.communicator is None
        assert stays is not None
        assert stays.communicator is not None
        assert stays.communicator.size == 1
        assert checkpoints([stays.communicator]) == [None]


def test_below_the_minimum_nobody_goes() -> None:
    with local_communicators(2, Config(elastic_min_world_size=2)) as world:
        world[1].leave()
        assert checkpoints(world) == [None, None]


def test_a_joiner_that_is_not_there_is_left_out_and_nothing_changes(three: list[Communicator]) -> None:
    for comm in three:
        pretend_waiting(comm)
    assert checkpoints(three, lambda: "state") == [None] * 3
    assert on_every(three, lambda comm: comm.all_reduce(1)) == [3] * 3


def test_all_learn_that_the_state_could_not_be_had(three: list[Communicator]) -> None:
    for comm in three:
        pretend_waiting(comm)

    def attempt(comm: Communicator) -> BaseException | None:
        try:
            comm.checkpoint(lambda: {}["model"])
        except (KeyError, NexarError) as error:
            return error
        return None

    first, *others = on_every(three, attempt)
    assert isinstance(first, KeyError)
    for other in others:
        assert isinstance(other, Cancelled)
        assert (other.rank, other.operation) == (0, "checkpoint")
        assert "state() raised KeyError: 'model'" in str(other)
    assert checkpoints(three, lambda: "now it can") == [None] * 3


def _reduce(comm: Communicator) -> None:
    comm.all_reduce(np.ones(2))


def _start(comm: Communicator) -> None:
    comm.start.barrier()


def _exit(_: Communicator) -> None:
    raise SystemExit(3)


def _misread(_: Communicator) -> None:
    raise ValueError("caf\udce9")  # a file name that is not UTF-8


def _interrupt(_: Communicator) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("does", "raised", "said"),
    [
        (_exit, SystemExit, "state() raised SystemExit: 3"),
        (_interrupt, KeyboardInterrupt, "state() raised KeyboardInterrupt"),
        (_misread, ValueError, r"state() raised ValueError: caf\udce9"),
        (_reduce, UsageError, "state() on rank 0 makes a call that waits for the other ranks"),
        (_start, UsageError, "state() on rank 0 makes a call that waits for the other ranks"),
        (Communicator.checkpoint, UsageError, "state() on rank 0 makes a call that waits for the other ranks"),
    ],
)
def test_all_learn_how_the_function_that_gives_the_state_ended(
    three: list[Communicator], does: Callable[[Communicator], object], raised: type[BaseException], said: str
) -> None:
    for comm in three:
        pretend_waiting(comm)

    def attempt(comm: Communicator) -> BaseException | None:
        try:
            comm.checkpoint(lambda: does(comm))
        except BaseException as error:  # noqa: BLE001 - what is looked at here
            return error
        return None

    first, *others = on_every(three, attempt)
    assert type(first) is raised
    for other in others:
        assert isinstance(other, Cancelled)
        assert other.rank == 0
        assert said in str(other)
    assert on_every(three, lambda comm: comm.all_reduce(1)) == [3] * 3


def test_the_function_that_gives_the_state_may_talk_to_one_rank(three: list[Communicator]) -> None:
    for comm in three:
        pretend_waiting(comm)
    three[1].send(np.ones(2), dest=0, tag=5)
    assert checkpoints(three, lambda: three[0].recv(source=1, tag=5)) == [None] * 3


@pytest.mark.parametrize("verb", ["checkpoint", "grow"])
def test_what_takes_too_long_has_the_name_and_the_time_that_the_user_gave(
    three: list[Communicator], verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_methods, "_GRACE", 0.05)
    pretend_waiting(three[0])
    with pytest.raises(CollectiveTimeout) as late:
        three[0].checkpoint(timeout=0.1) if verb == "checkpoint" else three[0].grow(1, timeout=0.1)
    assert (late.value.operation, late.value.timeout) == (verb, 0.1)
    assert f"{verb} #0 did not finish in 100 ms" in str(late.value)
    assert "NEXAR_ELASTIC_CHECKPOINT_TIMEOUT_SECS" in str(late.value)
    assert "object" not in str(late.value)


def test_all_are_notified_when_joiners_do_not_come(three: list[Communicator]) -> None:
    def attempt(comm: Communicator) -> str:
        with pytest.raises(OperationTimeout) as late:
            comm.grow(2, timeout=0.05)
        return str(late.value)

    assert all("joiners: 2 are needed, 0 wait" in each for each in on_every(three, attempt))


def test_with_fewer_than_the_minimum_a_checkpoint_waits_for_joiners() -> None:
    with (
        local_communicators(1, Config(elastic_min_world_size=2)) as (alone,),
        pytest.raises(OperationTimeout, match="1 are needed, 0 wait"),
    ):
        alone.checkpoint(timeout=0.05)


def test_who_waits_for_joiners_learns_at_once_that_a_member_was_lost(three: list[Communicator]) -> None:
    def attempt(comm: Communicator) -> NexarError:
        if comm.rank == 2:
            comm.__exit__(RuntimeError, RuntimeError("out of memory"), None)
            return Cancelled(operation="its own")
        with pytest.raises(MembershipChanged) as change:
            comm.grow(2, timeout=math.inf)
        return change.value

    for change in on_every(three, attempt)[:2]:
        assert isinstance(change, MembershipChanged)
        assert "out of memory" in change.lost[2]


@pytest.mark.parametrize("number", [0, -1, 1.5, "two", None])
def test_growing_by_what_is_no_number_is_refused(three: list[Communicator], number: object) -> None:
    with pytest.raises(UsageError, match="give the number of joiners, at least 1"):
        three[0].grow(number)  # type: ignore[arg-type]


def test_only_the_first_communicator_of_a_cluster_grows_and_shrinks(three: list[Communicator]) -> None:
    parts = on_every(three, lambda comm: comm.split(0))
    for call in (parts[0].checkpoint, parts[0].leave, lambda: parts[0].remove(1), lambda: parts[0].grow(1)):
        with pytest.raises(UsageError, match=r"on the communicator that nexar\.init"):
            call()


def test_a_rank_that_nobody_has_cannot_be_removed(three: list[Communicator]) -> None:
    with pytest.raises(UsageError, match="there is no rank 3"):
        three[0].remove(3)
