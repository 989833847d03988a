"""Measures all_reduce through the shared region, beside a minimal NumPy implementation on shared memory.

    python benchmarks/shared_memory.py [ranks] [--sizes 8,65536] [--slot-bytes 1048576] [--pin]

The reference has no errors, deadlines, sleeping or transports: it spins on flags.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from nexar.arrays.operators import reduction_of
from nexar.collectives.fingerprint import Fingerprint, OperationCode
from nexar.collectives.shared_region import SharedRegion
from nexar.collectives.shared_region_layout import SLOT_BYTES, create_memory, open_memory
from nexar.errors import InternalError
from nexar.links.progress import Progress
from nexar.transport.base import Carrier, Expected
from nexar.transport.shm.carrier import ShmCarrier
from nexar.transport.shm.transport import ShmTransport
from nexar.transport.sleeper import PollSleeper

SIZES = (8, 1024, 65536, 1 << 20, 16 << 20, 64 << 20)
BLOCKS = 5
TIMEOUT = 60.0
REFERENCE_CHUNK = 1 << 20


class Node:
    """A process with a shared-memory carrier to each of the others."""

    def __init__(self, rank: int) -> None:
        self.carriers: dict[int, ShmCarrier] = {}
        self.sleeper = PollSleeper()
        self.transport = ShmTransport(self.sleeper, rank + 1)
        self.transport.listen("", self)
        self.progress = Progress(self.sleeper, [self.transport])

    def connect(self, rank: int, address: str) -> None:
        self.carrier_accepted(self.transport.connect(address, Expected(rank + 1), time.monotonic() + TIMEOUT))

    def carrier_accepted(self, carrier: Carrier) -> None:
        assert isinstance(carrier, ShmCarrier)
        carrier.attach(self)
        self.carriers[carrier.peer.node - 1] = carrier

    def candidate_refused(self, address: str, reason: str) -> None:
        pass

    def frame_arrived(self, *_: Any) -> None:
        pass

    def payload_arrived(self, *_: Any) -> None:
        pass

    def carrier_finished(self, *_: Any) -> None:
        pass

    def carrier_lost(self, *_: Any) -> None:
        pass


class Members:
    """Callbacks of the region; none occurs in a correct run."""

    def awaited(self, index: int) -> Any:
        raise InternalError(f"rank {index} is missing")

    def aborted(self, index: int, operation: str) -> BaseException:
        return InternalError(f"rank {index} gave up {operation}")

    def differs(self, index: int, *_: Any) -> BaseException:
        return InternalError(f"rank {index} differs")


class Reference:
    """Per chunk: copy in, add this rank's share, copy out; flags in memory."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._flags = np.frombuffer(memory, np.int64, 16 * size).reshape(2, size, 8)
        slots = np.frombuffer(memory, np.float32, offset=4096).reshape(2, size, -1)
        self._slots = [[slots[parity, each] for each in range(size)] for parity in (0, 1)]
        self._round = 0

    def all_reduce(self, array: Any) -> None:
        """In place."""
        chunk = REFERENCE_CHUNK // 4
        for start in range(0, len(array), chunk):
            self._chunk(array[start : start + chunk])

    def _chunk(self, row: Any) -> None:
        rank, size, count = self._rank, self._size, len(row)
        self._round += 1
        slots = self._slots[self._round & 1]
        slots[rank][:count] = row
        self._synchronise(0)
        bounds = [count * each // size for each in range(size + 1)]
        mine = row[bounds[rank] : bounds[rank + 1]]
        for each in range(size):
            if each != rank:
                np.add(mine, slots[each][bounds[rank] : bounds[rank + 1]], mine)
        slots[rank][bounds[rank] : bounds[rank + 1]] = mine
        self._synchronise(1)
        for each in range(size):
            row[bounds[each] : bounds[each + 1]] = slots[each][bounds[each] : bounds[each + 1]]

    def _synchronise(self, which: int) -> None:
        flags = self._flags[which]
        flags[self._rank, 0] = self._round
        for flag in flags:
            spins = 0
            while flag[0] < self._round:
                spins += 1
                if spins > 50:
                    os.sched_yield()


class Runner:
    """One rank: measures both implementations."""

    def __init__(self, rank: int, size: int, region: SharedRegion, progress: Progress, reference: Reference) -> None:
        self._rank, self._size = rank, size
        self._region, self._progress, self._reference = region, progress, reference
        self._sum = reduction_of("sum")
        self._sequence = 0

    def ours(self, array: Any) -> None:
        """As a blocking call does it."""
        region = self._region
        self._sequence += 1
        fingerprint = Fingerprint(OperationCode.ALL_REDUCE, 11, len(array), 0, 1)
        order_number = region.reserve()
        region.announce(self._sequence, fingerprint)
        operation = region.all_reduce(
            order_number, array, self._sum, announcement=(self._sequence, fingerprint), spin=True
        )
        if not operation.done or operation.error is not None:
            self._progress.wait((operation,), time.monotonic() + TIMEOUT)

    def measure(self, size_bytes: int) -> dict[str, list[float]]:
        """Interleaved blocks of both; seconds of each call."""
        runs = 400 if size_bytes <= 65536 else 40 if size_bytes <= 1 << 20 else 3
        found: dict[str, list[float]] = {"region": [], "reference": []}
        implementations: dict[str, Callable[[Any], None]] = {
            "region": self.ours,
            "reference": self._reference.all_reduce,
        }
        for _ in range(BLOCKS):
            for name, run in implementations.items():
                found[name] += self._block(run, size_bytes, runs)
        return found

    def _block(self, run: Callable[[Any], None], size_bytes: int, runs: int) -> list[float]:
        array = np.zeros(max(size_bytes // 4, 1), np.float32)
        times = []
        for number in range(runs + runs // 10 + 1):
            array[:] = self._rank
            begin = time.perf_counter()
            run(array)
            if number > runs // 10:
                times.append(time.perf_counter() - begin)
            if array[0] != sum(range(self._size)) or array[-1] != array[0]:
                raise InternalError(f"wrong sum {array[0]}")
        return times


def rank_main(rank: int, size: int, shared: mmap.mmap, line: Connection, options: argparse.Namespace) -> None:
    """One process."""
    if options.pin:
        os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    node = Node(rank)
    line.send([node.transport.address_for(other + 1) for other in range(size)])
    addresses = line.recv()
    for other in range(rank):
        node.connect(other, addresses[other][rank])
    while len(node.carriers) < size - 1:
        time.sleep(0.01)
    if rank == 0:
        memory = create_memory(size, options.slot_bytes)
        line.send(memory.offer)
        line.recv()
    else:
        memory = open_memory(line.recv(), size)
    wake_calls = [node.carriers[each].wake_peer if each != rank else lambda: None for each in range(size)]
    region = SharedRegion(node.progress, memory, rank, Members(), wake_calls)
    line.send("ready")
    line.recv()
    runner = Runner(rank, size, region, node.progress, Reference(shared, rank, size))
    for size_bytes in options.sizes:
        line.send(runner.measure(size_bytes))
    line.recv()
    region.close()
    node.progress.close()


def show(size_bytes: int, size: int, found: dict[str, list[float]]) -> str:
    """One line for each implementation."""
    lines = []
    for name, times in found.items():
        times.sort()
        p10, p50, p99 = (times[int(len(times) * part)] * 1e6 for part in (0.1, 0.5, 0.99))
        busbw = size_bytes / p50 / 1e3 * 2 * (size - 1) / size
        lines.append(f"{size_bytes:>10} B  {name:<10}{p10:>10.1f}{p50:>10.1f}{p99:>10.1f} µs {busbw:>8.2f} GB/s")
    return "\n".join(lines)


def main() -> None:
    """Starts and connects the ranks, and prints rank 0's measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", nargs="?", type=int, default=2)
    parser.add_argument("--sizes", type=lambda text: [int(each) for each in text.split(",")], default=SIZES)
    parser.add_argument("--slot-bytes", type=int, default=SLOT_BYTES)
    parser.add_argument("--pin", action="store_true", help="each rank to a core, where a busy machine would move them")
    options = parser.parse_args()
    size = options.ranks
    shared = mmap.mmap(-1, 4096 + 2 * size * REFERENCE_CHUNK)
    context = multiprocessing.get_context("fork")
    pairs = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=rank_main, args=(rank, size, shared, pairs[rank][1], options), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    lines = [pair[0] for pair in pairs]
    addresses = [line.recv() for line in lines]
    for line in lines:
        line.send(addresses)
    offer = lines[0].recv()
    for line in lines[1:]:
        line.send(offer)
    for line in lines[1:]:
        line.recv()
    lines[0].send("go")
    lines[0].recv()
    for line in lines[1:]:
        line.send("go")
    lines[0].send("go")
    print(f"all_reduce of float32, {size} ranks       p10       p50       p99")
    for size_bytes in options.sizes:
        results = [line.recv() for line in lines]
        print(show(size_bytes, size, results[0]), flush=True)
    for line in lines:
        line.send("stop")
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
