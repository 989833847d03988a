"""Two hosts form one cluster with a ticket; all_reduce first sums inside each host, then between hosts.

    python examples/two_hosts.py

This process simulates two hosts on one machine and runs the commands of `PLAN` on each. If permitted, the hosts are
network namespaces that are connected by a virtual link. Otherwise they are two host ids on the network of this machine;
ranks of different hosts share no memory in this case either.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import nexar

PLAN = """
host-a$ nexar seed --size 4 --ticket-file ticket &
host-a$ nexar run -n 2 --ticket-file ticket examples/two_hosts.py work
host-b$ nexar run -n 2 --ticket-file ticket examples/two_hosts.py work
"""
COUNT = 250_000


def work() -> None:
    """Run one of the four ranks."""
    with nexar.init() as comm:
        local = comm.ranks_on_host
        print(f"on host {comm.host_index + 1} of {len(comm.hosts)}, with ranks {list(local)}", flush=True)
        x = np.full(COUNT, float(comm.rank))
        comm.all_reduce(x)
        assert (x == sum(range(comm.size))).all()
        links = comm.stats()["links"]
        remote = sum(link["bytes_sent"] for rank, link in links.items() if rank not in local)
        sent = comm.all_gather(remote / x.nbytes)
        if comm.rank == 0:
            print(f"all_reduce of {x.nbytes / 1e6:.0f} MB; share that each rank sent to the other host: "
                  f"{', '.join(f'{share:.0%}' for share in sent)}")  # fmt: skip


def ip(*arguments: str) -> None:
    """Run the command `ip`. Raises OSError or CalledProcessError."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def namespaces(stack: ExitStack) -> list[str]:
    """Two network namespaces that are connected by a virtual link; the stack removes them."""
    names = [f"nexar-example-{os.getpid()}-{host}" for host in ("a", "b")]
    for name in names:
        ip("netns", "add", name)
        stack.callback(ip, "netns", "delete", name)
    ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
    for number, name in enumerate(names):
        ip("-n", name, "address", "add", f"10.79.0.{number + 1}/24", "dev", "wire")
        for interface in ("lo", "wire"):
            ip("-n", name, "link", "set", interface, "up")
    return names


def hosts(stack: ExitStack) -> list[tuple[list[str], dict[str, str]]]:
    """For each host: the prefix of commands that run there, and their environment variables."""
    try:
        names = namespaces(stack)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"two hosts by host id only (no network namespaces: {error})", flush=True)
        return [([], {"NEXAR_HOST_ID": name, "NEXAR_BIND": "127.0.0.1"}) for name in ("host-a", "host-b")]
    print("two hosts, each a network namespace", flush=True)
    return [(["ip", "netns", "exec", name], {}) for name in names]


def main() -> None:
    """Run the commands of the plan."""
    print(PLAN.strip(), flush=True)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        there = dict(zip(("host-a", "host-b"), hosts(stack), strict=True))
        script = str(Path(__file__).resolve())
        running = []
        for line in PLAN.strip().splitlines():
            host, _, command = line.partition("$ nexar ")
            prefix, variables = there[host]
            words = command.removesuffix(" &").replace("examples/two_hosts.py", script).split()
            running.append(
                subprocess.Popen(
                    [*prefix, sys.executable, "-m", "nexar", *words], cwd=folder, env={**os.environ, **variables}
                )
            )
        assert [each.wait() for each in running] == [0, 0, 0]


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
