"""A rank that shares one core with all the others and with processes that never rest: nobody may be lost."""

import os
import subprocess
import sys
from contextlib import ExitStack

import nexar

BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"  # ends with its parent, however that ends
barriers, busy = map(int, sys.argv[1:])

with nexar.init() as comm, ExitStack() as processes:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # from here on: threads and children made later, too
    for _ in range(busy if comm.rank == 0 else 0):
        process = processes.enter_context(subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]))
        processes.callback(process.kill)
    for _ in range(barriers):
        comm.barrier()
    assert comm.epoch == 1
    sys.stdout.write(f"rank {comm.rank} of {comm.size} lost nobody\n")
