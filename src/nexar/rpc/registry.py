"""The functions that one rank serves, by name and by number."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from nexar.errors import UsageError
from nexar.types import whole
from nexar.wire.rpc import MAX_IDENTIFIER

MAX_NAME_BYTES: Final = 1024


class ServedFunction(NamedTuple):
    """A function that may be called."""

    name: str
    run: Callable[..., Any]
    asynchronous: bool  # its result must be awaited
    pickle: bool  # Callers may send pickled arguments and get pickled results: they are trusted with this process.


class Registry:
    """Thread-safe: entries are replaced at once and read without a lock."""

    def __init__(self) -> None:
        self._by_name: dict[str, ServedFunction] = {}  # dict methods are atomic
        self._by_number: dict[int, ServedFunction] = {}

    def add(self, run: Callable[..., Any], name: Any = None, number: Any = None, *, pickle: bool = False) -> None:
        """Replaces an earlier function. Raises UsageError if it cannot be called or named."""
        if not callable(run):
            raise UsageError(f"serve({run!r}): expected a function; give a function, or a name to decorate one with")
        name = _checked_name(name if name is not None else getattr(run, "__name__", None), run)
        identifier = None if number is None else _checked_number(number)
        function = ServedFunction(name, run, _is_asynchronous(run), pickle)
        self._by_name[name] = function
        if identifier is not None:
            self._by_number[identifier] = function

    def find(self, name: str | int) -> ServedFunction | None:
        return self._by_number.get(name) if isinstance(name, int) else self._by_name.get(name)

    def names(self) -> list[str]:
        numbers = {function.name: number for number, function in list(self._by_number.items())}
        return [f"{name} (id {numbers[name]})" if name in numbers else name for name in sorted(self._by_name)]


def function_name(function: Any) -> str | int:
    """A name or number, checked. Raises UsageError."""
    if isinstance(function, str):
        return _checked_name(function, None)
    return _checked_number(function)


def _checked_name(name: Any, run: Any) -> str:
    if not isinstance(name, str) or not name:
        raise UsageError(f"{name!r} is not a function name; give one, as in comm.serve(name='evaluate')(function)")
    if name == "<lambda>" and run is not None:
        raise UsageError("a lambda has no name to be called by; give it one: comm.serve('name')(lambda: …)")
    if len(name.encode(errors="replace")) > MAX_NAME_BYTES:
        raise UsageError(f"the name {name[:40]!r}… of a function is too long; at most {MAX_NAME_BYTES} bytes")
    return name


def _checked_number(number: Any) -> int:
    found = whole(number)
    if found is None or isinstance(number, bool) or not 0 <= found <= MAX_IDENTIFIER:
        raise UsageError(f"{number!r} is not a function id; ids are whole numbers from 0 to {MAX_IDENTIFIER}")
    return found


def _is_asynchronous(run: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(run) or inspect.iscoroutinefunction(getattr(run, "__call__", None))  # noqa: B004
