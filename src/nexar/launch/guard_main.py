"""The guard: ends the ranks of a launcher that is gone. A script of its own, with the standard library alone.

Its standard input is a pipe whose other end only the launcher holds. Lines on it: `+ID` a process group to know, `-ID`
one to forget, `bye`. The end of the pipe without `bye` means that the launcher died without a word (kill -9, the
out-of-memory killer), and then nobody else is left to clean up.
"""

import os
import signal
import sys
import time

GRACE = 2.0
"""Seconds between the polite and the impolite signal."""


def listen() -> set[int] | None:
    """The groups that are left when the launcher is gone; None after `bye`."""
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        if line == b"bye\n":
            return None
        (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
    return groups


def send(group: int, number: int) -> bool:
    """Whether there was anybody left to get the signal."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end(groups: set[int], mark: str) -> None:
    """Ask them to end, wait, make them; then whoever else carries the mark of this launch."""
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
    """Processes with the mark in their environment.

    This closes the moment between the start of a rank and the line that told of it. Where there is no /proc the list is
    empty and the moment stays open.
    """
    needle = f"NEXAR_LAUNCH={mark}".encode()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
    return [pid for pid in pids if needle in environment_of(pid)]


def environment_of(pid: int) -> list[bytes]:
    """The variables a process was started with; none if it is not ours to see."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def main() -> None:
    """Wait for the end of the launcher."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it outlives what ends the launcher, by a moment
    mark = sys.argv[1]
    left = listen()
    if left is not None:
        end(left, mark)


if __name__ == "__main__":
    main()
