"""What every error class is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar, dataclass_transform

from nexar.types import Rank

_Error = TypeVar("_Error", bound="NexarError")


@dataclass_transform(kw_only_default=True, eq_default=False)
def facts(cls: type[_Error]) -> type[_Error]:
    """Make the annotations keyword-only constructor arguments; identity, hash and repr stay those of an exception."""
    return dataclass(eq=False, repr=False, kw_only=True)(cls)


class NexarError(Exception):
    """Root of the tree: `except nexar.NexarError` catches everything nexar raises on purpose."""

    def __post_init__(self) -> None:
        """Called once the facts are set. They may quote what others wrote: none of it moves a cursor here."""
        self.args = (printable(self._message()),)

    def _message(self) -> str:
        raise NotImplementedError(f"{type(self).__name__} has facts but no message")

    def _travelling_facts(self) -> dict[str, Any]:
        return self.__dict__

    def __copy__(self) -> Self:
        """With all its facts, also those that do not travel; without a traceback of its own yet."""
        return _rebuild(type(self), self.args, self.__dict__)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle text and facts as they are, without building the message again."""
        return _rebuild, (type(self), self.args, self._travelling_facts())


def _rebuild(cls: type[_Error], args: tuple[Any, ...], facts: dict[str, Any]) -> _Error:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(facts)
    return error


LONGEST_LINE = 120
"""Characters of the first line of a message."""


def fitted(line: str, *lines: str) -> str:
    """`line` if it is one line of at most 120 characters, else `lines` one below the other, without empty ones. The
    first of `lines` must be short.
    """
    if len(line) <= LONGEST_LINE and "\n" not in line:
        return line
    return "\n".join(each for each in lines if each)


def headed(head: str, text: str) -> str:
    """`head: text`. The first line of `text` begins a line of its own if it does not fit behind `head`."""
    first, _, rest = text.partition("\n")
    return "\n".join(part for part in (fitted(f"{head}: {first}", head, first), rest) if part)


def list_ranks(ranks: Sequence[Rank]) -> str:
    """`rank 3`, `ranks 1, 2`, `ranks none`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + (", ".join(str(rank) for rank in ranks) or "none")


def printable(text: str) -> str:
    """`text` with a space for whatever does not print, but for the ends of its lines: nobody else's colours, cursor
    movements or titles reach a terminal by our errors.
    """
    if text.isprintable():
        return text
    return "\n".join("".join(each if each.isprintable() else " " for each in line) for line in text.split("\n"))


def told(error: BaseException) -> str:
    """What an error says, as a text that can be sent. Those of users may raise when they are asked."""
    try:
        return sendable(str(error))
    except Exception as failure:  # noqa: BLE001 - whatever it is, it must not hide the error that is told of
        return f"(it cannot be told: its __str__ raised {type(failure).__name__})"


def sendable(text: str) -> str:
    """`text` as it can be sent: with escapes for what is not Unicode, as file names are of another encoding."""
    return text.encode(errors="backslashreplace").decode()


def quote(text: str) -> str:
    """A text of somebody else inside a message. Further lines are marked, so that nobody, man or launcher, takes the
    traceback of another rank for that of this one."""
    return "\n    | ".join(text.rstrip().splitlines())


def during(operation: str | None) -> str:
    """The clause that names the interrupted operation, if there was one."""
    return f" during {operation}" if operation else ""
