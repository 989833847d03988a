import numpy as np
import pytest

from nexar.communicator.objects import decode_object
from nexar.errors import UsageError
from nexar.rpc.job import Job, cancelled, raised
from nexar.rpc.registry import Function
from nexar.wire.calls import Body, What, decode
from tests.unit.rpc.scene import Values, called


def job(function: Function, row: memoryview) -> Job:
    made = Job(1, 2, Values())
    made.bring(function, decode(row))
    return made


def served(run: object, *, pickle: bool = False) -> Function:
    return Function("f", run, False, pickle)  # type: ignore[arg-type]


def test_a_job_calls_its_function_and_makes_the_answer() -> None:
    made = job(served(lambda x, y: x - y), called("f", 5, y=3))
    assert made.run() == 2
    assert decode_object(decode(made.returned(2)).pieces) == 2


def test_large_arguments_are_let_go_when_the_function_has_them() -> None:
    made = job(served(len), called("f", np.zeros(10_000)))
    assert made.run() == 10_000
    assert made._body.pieces == ()


def test_results_are_pickled_only_where_caller_and_function_agreed() -> None:
    for pickle, asked, outcome in ((True, True, True), (True, False, False)):
        made = job(served(len, pickle=pickle), called("f", [1], pickle=asked))
        assert made.run() == 1
        assert decode(made.returned(1)).pickled is outcome
    with pytest.raises(UsageError, match="serve it with pickle=True"):
        job(served(len), called("f", [1], pickle=True)).run()


def test_a_job_is_over_when_its_time_is_or_nobody_waits() -> None:
    assert job(served(len), called("f", seconds=0.0)).over
    made = job(served(len), called("f"))
    assert not made.over
    made.abandoned = True
    assert made.over


def test_a_result_above_the_limit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"result of f takes .* 256 MiB"):
        job(served(len), called("f")).returned(np.zeros(300 << 20, np.uint8))


def test_answers_of_calls_that_came_to_nothing_say_why() -> None:
    assert decode(cancelled("closed")) == Body(What.CANCELLED, "closed")
    found = decode(raised(ValueError("no")))
    assert (found.what, found.text.splitlines()[-1]) == (What.RAISED, "ValueError: no")
