"""Two ends of remote calls without a network: what is posted is kept, and delivered when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from nexar.communicator.serialization import decode_object, encode_object
from nexar.links.operation import FINISHED, Operation
from nexar.wire.rpc import Body, call, decode


class Values:
    def encode(self, value: object, *, pickle: bool) -> Sequence[memoryview]:
        return encode_object(value, pickle=pickle)

    def decode(self, pieces: Sequence[memoryview], *, pickle: bool) -> Any:
        return decode_object(pieces, pickle=pickle)


class FakePost:
    """Stands for Post: remembers (node, space, number, body)."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, int, int, Body]] = []
        self.fault: Exception | None = None
        self.arrived = threading.Semaphore(0)

    def send(self, node: int, space: int, number: int, row: memoryview, deadline: float) -> Operation:
        if self.fault is not None:
            raise self.fault
        self.answer(node, space, number, row)
        return FINISHED

    def answer(self, node: int, space: int, number: int, row: memoryview) -> None:
        self.posted.append((node, space, number, decode(row)))
        self.arrived.release()

    def function_ended(self) -> None:
        """Nobody drives here."""

    def bodies(self) -> list[Body]:
        return [each[3] for each in self.posted]


def called(
    function: str | int, *arguments: Any, seconds: float = 20.0, pickle: bool = False, **named: Any
) -> memoryview:
    """The row of a call."""
    return call(function, seconds, encode_object([list(arguments), named], pickle=pickle), pickled=pickle)
