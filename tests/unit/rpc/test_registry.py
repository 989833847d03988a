import functools
from typing import Any

import pytest

from nexar.errors import UsageError
from nexar.rpc.registry import Registry, function_name


def evaluate() -> int:
    return 1


async def later() -> int:
    return 2


class Model:
    async def __call__(self) -> int:
        return 3


def test_a_function_is_found_by_its_name_and_by_its_number() -> None:
    registry = Registry()
    registry.add(evaluate, number=7)
    found = registry.find("evaluate")
    assert found is not None
    assert found is registry.find(7)
    assert (found.run, found.asynchronous, found.pickle) == (evaluate, False, False)
    assert registry.find("other") is None
    assert registry.find(8) is None


def test_registering_again_replaces() -> None:
    registry = Registry()
    registry.add(evaluate, number=7)
    registry.add(later, "evaluate")
    registry.add(evaluate, "third", 7)
    by_name, by_number = registry.find("evaluate"), registry.find(7)
    assert by_name is not None
    assert by_number is not None
    assert (by_name.run, by_number.name) == (later, "third")
    assert registry.names() == ["evaluate", "third (id 7)"]


@pytest.mark.parametrize("run", [later, Model(), functools.partial(later)])
def test_what_gives_something_to_await_is_known(run: Any) -> None:
    registry = Registry()
    registry.add(run, "f")
    found = registry.find("f")
    assert found is not None
    assert found.asynchronous


@pytest.mark.parametrize(
    ("run", "name", "number", "word"),
    [
        (3, None, None, "expected a function"),
        (lambda: 1, None, None, "lambda"),
        (functools.partial(evaluate), None, None, "not a function name"),
        (evaluate, "", None, "not a function name"),
        (evaluate, 5, None, "not a function name"),
        (evaluate, "x" * 2000, None, "too long"),
        (evaluate, None, -1, "0 to 65535"),
        (evaluate, None, 65536, "0 to 65535"),
        (evaluate, None, True, "0 to 65535"),
        (evaluate, None, "7", "0 to 65535"),
    ],
)
def test_what_cannot_be_called_or_named_is_refused(run: Any, name: Any, number: Any, word: str) -> None:
    registry = Registry()
    with pytest.raises(UsageError, match=word):
        registry.add(run, name, number)
    assert registry.names() == []


def test_a_caller_may_name_a_function_by_text_or_number() -> None:
    assert function_name("f") == "f"
    assert function_name(65535) == 65535
    for wrong in (65536, 1.5, None, ""):
        with pytest.raises(UsageError):
            function_name(wrong)
