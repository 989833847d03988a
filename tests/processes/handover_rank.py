"""A rank that waits in a barrier while rank 3 dies, and prints which threads recover it, in order.

Prints one JSON object: `threads` has the names of the threads that note the loss, adopt the next membership, finish the
build of its communicator, and raise its exception.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import nexar
from nexar.cluster.decisions.membership_events import PeerLossFound, ProbeFinished

STEPS = ("loss", "decision", "build", "exception")


def follow(comm: Any, note: Callable[[str], None]) -> None:
    runtime = comm._runtime
    put, adopt, opened = runtime.put, runtime.membership_adopted, runtime.successors._opened

    def noticed(event: Any) -> None:
        if isinstance(event, PeerLossFound | ProbeFinished) and event.loss is not None:
            note("loss")
        put(event)

    def adopted(*change: Any) -> None:
        note("decision")
        adopt(*change)

    def built(generation: Any) -> None:
        note("build")
        opened(generation)

    runtime.put = noticed
    runtime.membership_adopted = adopted
    runtime.successors._opened = built


def main() -> None:
    comm = nexar.init()
    threads: dict[str, str] = {}
    follow(comm, lambda step: threads.setdefault(step, threading.current_thread().name) and None)
    comm.barrier()
    if comm.rank == 3:
        time.sleep(0.3)  # most often the others wait by then
        os.kill(os.getpid(), signal.SIGKILL)
    rank = comm.rank
    try:
        comm.barrier()
    except nexar.MembershipChanged as change:
        threads["exception"] = threading.current_thread().name
        comm = change.communicator
    assert (comm.all_reduce(np.ones(10)) == 3).all()
    # A rank may learn of the change before it sees the loss.
    sys.stdout.write(json.dumps({"rank": rank, "threads": [threads[step] for step in STEPS if step in threads]}) + "\n")
    comm.close()


main()
