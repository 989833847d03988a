"""One call that this rank runs for another."""

from __future__ import annotations

import asyncio
import traceback
from time import monotonic
from typing import Any, Final

from nexar.errors import UsageError
from nexar.rpc.caller import Values
from nexar.rpc.registry import Function
from nexar.types import NodeId
from nexar.wire.calls import Body, What, encode

EXPIRED: Final = encode(Body(What.EXPIRED))


class Job:
    """Holds one of the places that calls have, from its arrival to its answer."""

    __slots__ = ("_body", "_values", "abandoned", "deadline", "function", "number", "source", "task")

    def __init__(self, source: NodeId, number: int, values: Values) -> None:
        self.source = source
        self.number = number
        self._values = values
        self._body = Body(What.CALL)
        self.function: Function | None = None  # set with the body; None while that is still on its way
        self.deadline = 0.0  # of time.monotonic; likewise
        self.abandoned = False  # nobody waits for the answer; written under the node's lock
        self.task: asyncio.Task[memoryview] | None = None  # of the loop's thread

    def bring(self, function: Function, body: Body) -> None:
        """What is to be done. By who takes the call in, before anybody runs it."""
        self.function = function
        self._body = body
        self.deadline = monotonic() + body.seconds

    @property
    def over(self) -> bool:
        """Nobody would hear the answer."""
        return self.abandoned or monotonic() >= self.deadline

    def run(self) -> Any:
        """Call the function: what it gives. Raises whatever it raises."""
        assert self.function is not None
        arguments, named = self._arguments(self.function)
        self._body = self._body._replace(pieces=())
        return self.function.run(*arguments, **named)

    def _arguments(self, function: Function) -> tuple[list[Any], dict[str, Any]]:
        body = self._body
        if body.pickled and not function.pickle:
            raise UsageError(
                f"the arguments of {function.name} were pickled, and reading them would run code of the caller's "
                "choice; call it without pickle=True, or serve it with pickle=True if you trust its callers"
            )
        arguments, named = self._values.decode(body.pieces, pickle=function.pickle)
        return arguments, named

    def returned(self, value: Any) -> memoryview:
        """The answer that carries this. Raises if it cannot be sent."""
        assert self.function is not None
        pickle = self._body.pickled and self.function.pickle
        pieces = self._values.encode(value, pickle=pickle)
        try:
            return encode(Body(What.RETURNED, pieces=pieces, pickled=pickle))
        except ValueError as error:
            raise UsageError(f"the result of {self.function.name} takes {error}; send large arrays") from error


def raised(error: BaseException) -> memoryview:
    """The answer of a call that ended with this."""
    return encode(Body(What.RAISED, "".join(traceback.format_exception(error))))


def cancelled(reason: str) -> memoryview:
    """The answer of a call that was cancelled here."""
    return encode(Body(What.CANCELLED, reason))
