"""A rank that calls init() with something wrong: `formation_rank.py MISTAKE`. It prints its world, or what was raised.

A mistake is made before nexar is imported, as a user's environment would make it.
"""

import json
import os
import signal
import sys
import time

rank, mistake = int(os.environ.get("RANK", "0")), sys.argv[1]


def differing_transports() -> None:
    os.environ["NEXAR_TRANSPORTS"] = "tls" if rank == 0 else "quic"


def killed_after_the_commit() -> None:
    from nexar.communicator.generation_builder import GenerationBuilder

    if rank == 1:  # the first communicator is made when the membership is committed
        GenerationBuilder.make = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)


def unreachable_pair() -> None:
    """Ranks 1 and 2 reach rank 0, and advertise a port where nobody listens."""
    os.environ["NEXAR_HOST_ID"] = f"host{rank}"
    if rank > 0:
        os.environ |= {"NEXAR_IFACE": "^lo", "NEXAR_ADVERTISE": "127.0.0.77:9"}


def undialable_rank() -> None:
    """Rank 5 reaches everybody, and advertises a port where nobody listens."""
    os.environ["NEXAR_HOST_ID"] = f"host{rank}"
    if rank == 5:
        os.environ |= {"NEXAR_IFACE": "^lo", "NEXAR_ADVERTISE": "127.0.0.77:9"}


def clock_ahead(seconds: float = 1800.0) -> None:
    true = time.time
    if rank == 1:
        time.time = lambda: true() + seconds


def clock_behind() -> None:
    clock_ahead(-1800.0)


def differing_setting() -> None:
    if rank == 1:
        os.environ["NEXAR_PIPELINE_SEGMENT_BYTES"] = "65536"


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps({"rank": rank, **facts}) + "\n")
    sys.stdout.flush()


globals()[mistake]()

import nexar  # noqa: E402

if sys.argv[2:]:  # a command of nexar, with the same mistake
    from nexar.cli.main import main

    sys.argv[1:] = sys.argv[2:]
    main()

try:
    with nexar.init() as comm:
        say(world=[comm.rank, comm.size, comm.epoch])
except nexar.NexarError as error:
    say(kind=type(error).__name__, error=str(error))
    sys.exit(3)
