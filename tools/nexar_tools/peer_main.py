"""The program of a peer process: the child of `peer_process`.

It ends when its parent dies, which it notices by the end of its input without a PeerStop.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from importlib import import_module
from typing import Any, TypeVar

import msgspec

from nexar.config import Config
from nexar_tools.peer_protocol import (
    ConnectTo,
    PeerNode,
    PeerOrder,
    PeerReady,
    PeerReport,
    PeerResult,
    PeerStart,
    PeerStop,
)

_ORPHAN_EXIT_CODE = 3
_Wanted = TypeVar("_Wanted", PeerStart, ConnectTo, PeerStop)


class Parent:
    """The connection to the parent. Standard output carries reports, so prints go to standard error."""

    def __init__(self) -> None:
        self._reports = os.dup(1)
        os.dup2(2, 1)
        self._orders: queue.SimpleQueue[PeerOrder] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="nexar-orders", daemon=True).start()

    def _listen(self) -> None:
        # Unbuffered: a daemon thread that holds the lock of Python's buffers would break the interpreter's exit.
        received = b""
        stopping = False
        while data := os.read(0, 1 << 16):
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                order: PeerOrder = msgspec.json.decode(line, type=PeerOrder)
                stopping = stopping or isinstance(order, PeerStop)
                self._orders.put(order)
        if not stopping:
            os._exit(_ORPHAN_EXIT_CODE)

    def next(self, wanted: type[_Wanted], timeout: float | None = None) -> _Wanted:
        """Returns the next order. Raises TimeoutError, and TypeError if it is of another kind."""
        try:
            order = self._orders.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"the parent did not send {wanted.__name__} within {timeout} s") from None
        if not isinstance(order, wanted):
            raise TypeError(f"the parent sent {type(order).__name__} instead of {wanted.__name__}")
        return order

    def report(self, report: PeerReport) -> None:
        line = memoryview(msgspec.json.encode(report) + b"\n")
        while line:
            line = line[os.write(self._reports, line) :]


def main() -> None:
    """Runs the function that the parent names. The exit code is 1 if it raised."""
    parent = Parent()
    start = parent.next(PeerStart)
    sys.path[:] = start.path
    try:
        result = _serve(parent, start)
    except BaseException:  # noqa: BLE001  # the parent shows any error
        parent.report(PeerResult(failure=traceback.format_exc()))
        sys.exit(1)
    sys.exit(result)


def _serve(parent: Parent, start: PeerStart) -> int:
    node = _make_node(start)
    try:
        parent.report(PeerReady(node.addresses_for(start.peer)))
        line = _connect(node, start, parent.next(ConnectTo, start.timeout).addresses)
        outcome = _call(start, node, line)
        parent.report(outcome)
        if outcome.failure is None:
            parent.next(PeerStop)
        return 0 if outcome.failure is None else 1
    finally:
        node.close()


def _make_node(start: PeerStart) -> PeerNode:
    spin = {} if start.spin is None else {"spin": start.spin}
    make = _load(start.node_class)
    config = Config(**start.settings)
    node: PeerNode = make(start.credentials, start.trust, start.schemes, host=start.host, config=config, **spin)
    return node


def _connect(node: PeerNode, start: PeerStart, addresses: dict[str, str] | None) -> Any:
    if addresses is not None:
        return node.connect(start.peer, addresses, start.timeout)
    line = node.accept(start.timeout)
    wait_for_carriers(line, start.schemes, time.monotonic() + start.timeout)
    return line


def wait_for_carriers(line: Any, schemes: list[str], deadline: float) -> None:
    """Blocks until a link has a carrier of each scheme: it is accepted with the first. Other lines are complete."""
    stats = getattr(line, "stats", None)
    if len(schemes) < 2 or stats is None:
        return
    while not all(any(name.startswith(f"{scheme}.") for name in stats()) for scheme in schemes):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not every carrier of {', '.join(schemes)} was connected in time: {stats()}")
        time.sleep(0.001)


def _call(start: PeerStart, node: PeerNode, line: Any) -> PeerResult:
    try:
        result = _load(start.function)(node, line, *start.arguments)
        msgspec.json.encode(result)
    except BaseException:  # noqa: BLE001  # the parent shows any error
        return PeerResult(failure=traceback.format_exc())
    return PeerResult(result=result)


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


if __name__ == "__main__":
    main()
