"""The processes of a siege: `seed SIZE SETTINGS` opens a seed, `nodes` forms with it. Both obey lines on their standard
input and answer each with one line of JSON.
"""

import json
import sys
import threading
import time
from typing import Any

import nexar


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201


def attend(size: int, settings: dict[str, Any]) -> None:
    """Each line: say what has happened at the seed, from that number on. All of it is kept here: the seed's own events
    are the newest, and noise makes many.
    """
    notes: list[Any] = []
    with nexar.Seed("127.0.0.1:0", size, on_event=notes.append, **settings) as seed:
        say({"ticket": seed.ticket, "address": seed.address})
        for line in sys.stdin:
            say([[note.kind, note.address, note.node, note.reason] for note in notes[int(line) :]])


class Nodes:
    """Nodes of one process, a thread each. `count ticket`: that many more join. `wait`: until all have met."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._faults: list[str] = []
        self._ended = 0.0  # when the last of them had met; all processes share this clock

    def obey(self, line: str) -> object:
        count, _, ticket = line.partition(" ")
        if ticket:
            self._start(int(count), ticket.strip())
            return "started"
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        return {"faults": self._faults, "ended": self._ended}

    def _start(self, count: int, ticket: str) -> None:
        made = [threading.Thread(target=self._take_part, args=(ticket,)) for _ in range(count)]
        self._threads += made
        for thread in made:
            thread.start()

    def _take_part(self, ticket: str) -> None:
        try:
            with nexar.connect(ticket) as comm:
                comm.barrier()
        except Exception as fault:  # noqa: BLE001 - told to the test
            self._faults.append(repr(fault))
        self._ended = time.monotonic()


def obey() -> None:
    nodes = Nodes()
    say("ready")
    for line in sys.stdin:
        say(nodes.obey(line))


if __name__ == "__main__":
    if sys.argv[1] == "seed":
        attend(int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        obey()
