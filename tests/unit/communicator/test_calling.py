from collections.abc import Iterator

import pytest

from nexar.communicator.calling import CallRequest, Remote
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import UsageError
from tests.ranks import PATIENCE


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
    with pytest.raises(UsageError, match="no name"):
        remote.call("")


def test_a_started_call_is_a_request_whose_time_runs_from_its_start(alone: Communicator) -> None:
    alone.serve("f")(lambda: 5)
    request = alone.start.on(0).f()
    assert isinstance(request, CallRequest)
    assert request.wait(PATIENCE) == 5
    assert request._waited() > 0
    assert request._timeout == pytest.approx(7.0, abs=1.0)
    assert "remote call f on rank 0" in repr(request)


def test_what_is_wrong_is_refused_at_once(alone: Communicator) -> None:
    for wrong in (-1, 1, None):
        with pytest.raises(UsageError, match="ranks 0 to 0"):
            alone.on(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="above 0"):
        alone.start.on(0, timeout=-1.0)
    with pytest.raises(UsageError, match="no function"):
        alone.serve(3)  # type: ignore[call-overload]
