"""The guard process: ends the ranks of a launcher that died. Uses the standard library alone.

Input lines: `+ID` adds a process group, `-ID` removes one, `bye` ends the guard. If the pipe ends without `bye`, the
launcher was killed.
"""

import os
import signal
import sys
import time

GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL."""


def listen() -> set[int] | None:
    """Block until the launcher is gone. Return its process groups; None after `bye`."""
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        if line == b"bye\n":
            return None
        (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
    return groups


def send(group: int, number: int) -> bool:
    """Whether a process got the signal."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end(groups: set[int], mark: str) -> None:
    """Send SIGTERM, after GRACE SIGKILL; then kill all other processes of this launch."""
    deadline = time.monotonic() + GRACE
    left = {group for group in groups if send(group, signal.SIGTERM)}
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = {group for group in left if send(group, 0)}
    for group in groups:
        send(group, signal.SIGKILL)
    for pid in marked(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def marked(mark: str) -> list[int]:
    """Return the processes of this launch, also those not announced yet. Needs /proc."""
    needle = f"NEXAR_LAUNCH={mark}".encode()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
    return [pid for pid in pids if needle in environment_of(pid)]


def environment_of(pid: int) -> list[bytes]:
    """Empty if not readable."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def main() -> None:
    """Wait for the end of the launcher."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the guard must outlive the signal that ends the launcher
    mark = sys.argv[1]
    left = listen()
    if left is not None:
        end(left, mark)


if __name__ == "__main__":
    main()
