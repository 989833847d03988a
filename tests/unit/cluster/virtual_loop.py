"""A control loop without a thread, in time that a test owns."""

from nexar.cluster.control_loop import ControlLoop
from nexar.testing.virtual_clock import VirtualClock


class VirtualLoop(ControlLoop):
    """Runs its timers in `advance`, each at its own time."""

    def __init__(self, start: float = 0.0) -> None:
        self.clock = VirtualClock(start)
        super().__init__(clock=self.clock, threaded=False)

    def advance(self, seconds: float) -> None:
        end = self.clock.now() + seconds
        self.step()
        while (due := self.next_due()) is not None and due <= end:
            self.clock.advance(max(0.0, due - self.clock.now()))
            self.step()
        self.clock.advance(end - self.clock.now())
