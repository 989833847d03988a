"""Two hosts become one cluster with one string, and add up arrays: first inside each host, then between them.

    python examples/two_hosts.py

This process plays two hosts on one machine, and types on each what you would type there (see `PLAN`). Where that is
permitted, the hosts are network namespaces: each has a network of its own, and a wire leads from one to the other. Else
they are two names on this machine's network; then, too, ranks of different hosts share no memory.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import nexar
from nexar.testing.network_namespaces import NetworkNamespaces, permitted

PLAN = """
host-a$ nexar seed --size 4 --ticket-file ticket &
host-a$ nexar run -n 2 --ticket-file ticket examples/two_hosts.py work
host-b$ nexar run -n 2 --ticket-file ticket examples/two_hosts.py work
"""
COUNT = 250_000


def work() -> None:
    """What each of the four ranks does."""
    with nexar.init() as comm:
        near = comm.ranks_on_host
        print(f"I am on host {comm.host_index + 1} of {len(comm.hosts)}, with the ranks {list(near)}", flush=True)
        x = np.full(COUNT, float(comm.rank))
        comm.all_reduce(x)
        assert (x == sum(range(comm.size))).all()
        links = comm.stats()["links"]
        away = sum(link["bytes_sent"] for rank, link in links.items() if rank not in near)
        sent = comm.all_gather(away / x.nbytes)
        if comm.rank == 0:
            print(f"an array of {x.nbytes / 1e6:.0f} MB was added up; of it, each rank has sent to the other host: "
                  f"{', '.join(f'{share:.0%}' for share in sent)}")  # fmt: skip


def hosts(stack: ExitStack) -> list[tuple[list[str], dict[str, str]]]:
    """For each host: what goes before a command that is to run there, and the variables it has."""
    reason = permitted()
    if reason is None:
        print("two hosts, each a network namespace, with a wire between them", flush=True)
        network = stack.enter_context(NetworkNamespaces())
        return [(list(place.prefix), {}) for place in network.places]
    print(f"two hosts by name alone ({reason})", flush=True)
    return [([], {"NEXAR_HOST_ID": name, "NEXAR_BIND": "127.0.0.1"}) for name in ("host-a", "host-b")]


def main() -> None:
    """Types the plan."""
    print(PLAN.strip(), flush=True)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        there = dict(zip(("host-a", "host-b"), hosts(stack), strict=True))
        script = str(Path(__file__).resolve())
        typed = []
        for line in PLAN.strip().splitlines():
            host, _, command = line.partition("$ nexar ")
            prefix, variables = there[host]
            words = command.removesuffix(" &").replace("examples/two_hosts.py", script).split()
            typed.append(
                subprocess.Popen(
                    [*prefix, sys.executable, "-m", "nexar", *words], cwd=folder, env={**os.environ, **variables}
                )
            )
        assert [each.wait() for each in typed] == [0, 0, 0]


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
