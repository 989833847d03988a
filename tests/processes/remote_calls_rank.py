"""One rank of a test of remote calls: rank 1 serves and may be killed in mid-call, rank 0 asks and says what it saw."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import nexar

hangs = threading.Event()


def serve(comm: nexar.Communicator) -> None:
    @comm.serve
    def add(x: int, y: int) -> int:
        return x + y

    @comm.serve
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @comm.serve
    def leave_hanging() -> None:
        hangs.set()
        threading.Event().wait()

    @comm.serve
    async def nap() -> None:
        await asyncio.sleep(60)


def lost(call: Callable[[], object]) -> nexar.Communicator | None:
    """Rank 1 is, says the call; and gives the communicator to go on with, where there is one."""
    try:
        call()
    except nexar.PeerLost as error:
        assert error.rank == 1, error  # noqa: PT017
        return None
    except nexar.MembershipChanged as change:
        assert list(change.lost) == [1], change  # noqa: PT017
        return change.communicator
    raise SystemExit("no error came")


with nexar.init(recovery_policy=sys.argv[1]) as comm:
    serve(comm)
    comm.barrier()
    if comm.rank == 1:
        threading.Event().wait(60)
        raise SystemExit("rank 1 was to be killed")
    assert all(comm.on(1).add(number, 1) == number + 1 for number in range(200))
    held = comm.start.on(1).nap()
    begin = time.monotonic()
    successors = [lost(call) for call in (comm.on(1).die, held.wait, partial(comm.on(1).add, 1, 2))]
    assert time.monotonic() - begin < 15, "the errors came late"  # far below the timeout of a call
    alone = successors[0] or comm
    assert alone.on(alone.rank).add(1, 2) == 3  # functions stay registered
    hanging = alone.start.on(alone.rank).leave_hanging()  # must not keep the process from ending
    assert hangs.wait(15)  # a call that has not begun when its communicator ends is never begun
    sys.stdout.write("lost and alive\n")
