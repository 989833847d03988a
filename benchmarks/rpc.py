"""Measures remote calls and how soon errors arrive.   python benchmarks/rpc.py [--transport shm,tls]

Two processes on this host: sequential calls of an addition, by one thread and by eight; 64 non-blocking calls in
flight; then each failure, from its cause to the error at the caller.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import nexar

CALLS = 4000
THREADS = 8
IN_FLIGHT = 64
ROUNDS = 20


def main() -> None:
    """The parent process."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--transport", default="", help="those of the setting `transports`; default: all there are")
    options.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.rank:
        rank(tuple(filter(None, chosen.transport.split(","))))
        return
    ranks = (sys.executable, "-m", "nexar", "run", "-n", "2", __file__, "--rank", "--transport", chosen.transport)
    subprocess.run(ranks, check=True, timeout=300)


def rank(transports: tuple[str, ...]) -> None:
    """Rank 1 serves, rank 0 calls. The last measurement kills rank 1."""
    settings = {"transports": transports} if transports else {}
    with nexar.init(recovery_policy="manual", **settings) as comm:
        if comm.rank == 1:
            serve(comm)
        comm.barrier()
        if comm.rank == 1:
            threading.Event().wait()  # no thread waits in nexar: its progress thread drives
        remote = comm.on(1)
        for name, figures in measured(comm, remote):
            print(f"{name:34} {figures}", flush=True)


def serve(comm: nexar.Communicator) -> None:
    """Registers the functions."""

    @comm.serve
    def add(x: float, y: float) -> float:
        return x + y

    @comm.serve(name="add_async")
    async def _add_async(x: float, y: float) -> float:
        return x + y

    @comm.serve
    def echo(x: Any) -> Any:
        return x

    @comm.serve
    def when_raised() -> None:
        raise ValueError(repr(time.monotonic()))

    @comm.serve
    def die_at(moment: float) -> None:
        time.sleep(max(0.0, moment - time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    @comm.serve
    async def hold(seconds: float) -> None:
        await asyncio.sleep(seconds)


def measured(comm: nexar.Communicator, remote: Any) -> Any:
    """Name and figures of each measurement."""
    yield "one thread", in_turn(remote.add)
    yield "one thread, async def", in_turn(remote.add_async)
    yield f"{THREADS} threads", in_threads(remote.add)
    yield f"{IN_FLIGHT} in flight", in_flight(comm)
    yield "1 MB there and back", per_call([timed(partial(remote.echo, np.ones(1 << 17))) for _ in range(200)])
    yield "unknown function", late(remote.nothing_of_that_name, lambda _, begin: begin)
    yield "exception", late(remote.when_raised, lambda error, _: float(error.traceback.split("ValueError: ")[-1]))
    yield "timeout of 50 ms", late(partial(comm.on(1, timeout=0.05).hold, 5.0), lambda _, begin: begin + 0.05)
    yield "cancelled", late_cancels(comm)
    yield "overload", late_overload(comm)
    yield (
        "peer killed in mid-call",
        late(partial(remote.die_at, moment := time.monotonic() + 0.3), lambda *_: moment, 1),
    )


def in_turn(call: Callable[..., Any], calls: int = CALLS) -> str:
    """Sequential calls."""
    for number in range(calls // 10):
        call(number, 1)
    return per_call([timed(partial(call, 1, 2)) for _ in range(calls)])


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def per_call(times: list[float]) -> str:
    """Figures of sequential calls."""
    times.sort()
    p99 = times[len(times) * 99 // 100]
    return f"{len(times) / sum(times):7.0f} calls/s   p50 {median(times) * 1e6:6.0f} µs   p99 {p99 * 1e6:6.0f} µs"


def in_threads(call: Callable[..., Any]) -> str:
    """Sequential calls of several threads."""
    threads = [threading.Thread(target=in_turn, args=(call, CALLS // 4)) for _ in range(THREADS)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return f"{THREADS * (CALLS // 4 + CALLS // 40) / (time.perf_counter() - begin):7.0f} calls/s"


def in_flight(comm: nexar.Communicator) -> str:
    """Non-blocking calls."""
    begin = time.perf_counter()
    for _ in range(CALLS // IN_FLIGHT):
        nexar.wait_all([comm.start.on(1).add(1, number) for number in range(IN_FLIGHT)])
    return f"{CALLS // IN_FLIGHT * IN_FLIGHT / (time.perf_counter() - begin):7.0f} calls/s"


def late(call: Callable[[], Any], cause: Callable[[Any, float], float], rounds: int = ROUNDS) -> str:
    """From the cause to the error. Processes of one host share the clock."""
    times = []
    for _ in range(rounds):
        begin = time.monotonic()
        try:
            call()
        except nexar.NexarError as error:
            times.append(time.monotonic() - cause(error, begin))
            name = type(error).__name__
    return of_errors(name, times)


def late_cancels(comm: nexar.Communicator) -> str:
    """From cancel() to the error."""
    times = []
    for _ in range(ROUNDS):
        request = comm.start.on(1).hold(5.0)
        time.sleep(0.01)
        begin = time.monotonic()
        request.cancel()
        try:
            request.wait()
        except nexar.RpcCancelled:
            times.append(time.monotonic() - begin)
    return of_errors("RpcCancelled", times)


def late_overload(comm: nexar.Communicator) -> str:
    """From the call to the error while all slots are taken."""
    held = [comm.start.on(1).hold(60.0) for _ in range(comm.config.rpc_concurrency)]
    figures = late(partial(comm.on(1).add, 1, 2), lambda _, begin: begin)
    for each in held:
        each.cancel()
    return figures


def of_errors(name: str, times: list[float]) -> str:
    """Median and maximum."""
    return f"{name}: median {median(times) * 1e3:6.2f} ms   worst {max(times) * 1e3:6.2f} ms"


if __name__ == "__main__":
    main()
