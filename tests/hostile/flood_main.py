"""A rank of a flood test: `TICKET`. It says where it can be reached over QUIC, and talks to the other rank until both
were asked to stop. Each line on the standard input is answered by figures; `stop` ends it.
"""

import json
import sys
import threading
import time

import numpy as np

import nexar

MESSAGE_BYTES = 1 << 16


def talk(comm: nexar.Communicator, stop: threading.Event, seconds: list[float]) -> None:
    """All-reduce until both ranks have been asked to stop."""
    data = np.ones(MESSAGE_BYTES // 4, np.float32)
    while True:
        wanted = np.array([0 if stop.is_set() else 1], np.int32)
        if not comm.all_reduce(wanted, op="min")[0]:
            return
        begin = time.monotonic()
        comm.all_reduce(data, op="max")
        seconds.append(time.monotonic() - begin)


def figures(seconds: list[float]) -> dict[str, float]:
    taken, seconds[:] = seconds[:], []
    return {"calls": len(taken), "longest_s": max(taken, default=0.0)}


def main(ticket: str) -> None:
    stop, seconds = threading.Event(), list[float]()
    with nexar.connect(ticket, transports=("quic",), bind="127.0.0.1") as comm:
        talking = threading.Thread(target=talk, args=(comm, stop, seconds))
        talking.start()
        address = comm.membership.members[comm.rank].addresses["quic"][0]
        print(json.dumps(address), flush=True)  # noqa: T201
        for line in sys.stdin:
            if line.strip() == "stop":
                break
            print(json.dumps(figures(seconds)), flush=True)  # noqa: T201
        stop.set()
        talking.join()


if __name__ == "__main__":
    main(sys.argv[1])
