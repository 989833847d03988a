from collections.abc import Iterator

import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.communicator.rpc_methods import CallRequest, Remote
from nexar.config import Config
from nexar.errors import Revoked, UsageError
from tests.ranks import EVENT_TIMEOUT, on_every


@pytest.fixture
def alone() -> Iterator[Communicator]:
    with local_communicators(1, Config(rpc_timeout=7.0)) as (made,):
        yield made


def test_every_way_to_register_gives_the_function_back(alone: Communicator) -> None:
    def f(x: int) -> int:
        return x + 1

    assert alone.serve(f) is f
    assert alone.serve("g")(f) is f
    assert alone.serve()(f) is f
    assert alone.serve(name="h", id=3)(f) is f
    assert alone.serve(f, name="i", id=4, pickle=True) is f
    remote = alone.on(0)
    assert [remote.f(1), remote.g(1), remote.h(1), remote.i(1), remote.call(3, 1), remote.call(4, 1)] == [2] * 6


def test_a_rank_has_a_method_for_every_name_but_the_languages_own() -> None:
    seen: list[object] = []
    remote = Remote(lambda *call: seen.append(call))
    remote.evaluate(1, step=2)
    remote.call("call", 3)
    assert seen == [("evaluate", (1,), {"step": 2}), ("call", (3,), {})]
    assert not hasattr(remote, "__array__")
    with pytest.raises(UsageError, match="is not a function name"):
        remote.call("")


def test_a_started_call_is_a_request_whose_time_runs_from_its_start(alone: Communicator) -> None:
    alone.serve("f")(lambda: 5)
    request = alone.start.on(0).f()
    assert isinstance(request, CallRequest)
    assert request.wait(EVENT_TIMEOUT) == 5
    assert request._waited() > 0
    assert request._timeout == pytest.approx(7.0, abs=1.0)
    assert "remote call f on rank 0" in repr(request)


def test_what_is_wrong_is_refused_at_once(alone: Communicator) -> None:
    for wrong in (-1, 1, None):
        with pytest.raises(UsageError, match="ranks 0 to 0"):
            alone.on(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="above 0"):
        alone.start.on(0, timeout=-1.0)
    with pytest.raises(UsageError, match="expected a function"):
        alone.serve(3)  # type: ignore[call-overload]


def test_what_is_registered_on_an_old_communicator_is_served_by_the_newest() -> None:
    with local_communicators(2, Config()) as world:
        newest = on_every(on_every(world, lambda comm: comm.shrink()), lambda comm: comm.shrink())
        world[1].serve("answer")(lambda: 42)
        assert newest[0].on(1, timeout=EVENT_TIMEOUT).answer() == 42


def test_where_nobody_could_call_it_nothing_is_registered() -> None:
    with local_communicators(2, Config()) as world:
        parts = on_every(world, lambda comm: comm.split(0))
        old, newer = parts[0], on_every(parts, lambda comm: comm.shrink())[0]  # type: ignore[union-attr]
        assert old is not None
        newer.close()
        for comm in (old, newer):
            with pytest.raises(UsageError, match="closed"):
                comm.serve("late")(lambda: 0)
    with local_communicators(1, Config()) as (alone,):
        alone.revoke("enough")
        with pytest.raises(Revoked):
            alone.serve("late")(lambda: 0)
    with pytest.raises(UsageError, match="closed"):
        world[1].serve("late")(lambda: 0)
