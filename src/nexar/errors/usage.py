"""Errors of the caller: the call, or a setting, cannot mean anything. And of ours."""

from nexar.errors.base import LONGEST_LINE, NexarError, facts, fitted
from nexar.types import NodeId, Rank, describe_peer


class UsageError(NexarError, ValueError):
    """The call cannot mean anything: a wrong argument, a closed object, a forked child. Also a ValueError. Takes the
    message itself.
    """


@facts
class BufferMismatch(UsageError):
    """A receive was given a buffer of another size or dtype than the message. The message stays receivable."""

    expected: str
    """What the buffer holds, e.g. `float32[4]`."""
    found: str
    """What arrived."""
    source: Rank | None = None
    node: NodeId | None = None
    tag: int | None = None

    def _message(self) -> str:
        tag = "" if self.tag is None else f" with tag {self.tag}"
        return (
            f"the receive buffer is {self.expected}, but the message from {describe_peer(self.source, self.node)}{tag} "
            f"is {self.found}; it is kept: receive it into a buffer of that size and dtype, or without one"
        )


@facts
class ConfigError(NexarError):
    """A setting has a value that is not allowed, or there is no such setting."""

    variable: str
    value: object
    """Empty: it is not set, and is needed."""
    allowed: str
    hint: str = ""
    because: str = ""
    """Why it is needed, where it is not set."""
    unknown: bool = False
    """There is no setting of this name."""

    def _message(self) -> str:
        if self.unknown:
            return f"unknown setting {self.variable}; {self.hint}"
        hint = f" ({self.hint})" if self.hint else ""
        if self.value == "":
            missing = f"{self.variable} is not set"
            because = fitted(f"{missing}; {self.because}", missing, self.because) if self.because else missing
            return self._in_lines(because, f"set it to {self.allowed}", hint)
        return self._in_lines(f"{self.variable} = {self.value!r} is refused", f"allowed: {self.allowed}", hint)

    def _in_lines(self, first: str, remedy: str, hint: str) -> str:
        long_value = (f"{self.variable} has a value that is refused", repr(self.value))
        short = first if len(first.splitlines()[0]) <= LONGEST_LINE else "\n".join(long_value)
        return fitted(f"{first}; {remedy}{hint}", short, remedy, self.hint)


@facts
class VersionMismatch(NexarError):
    """Two nodes speak different versions of the protocol."""

    ours: int
    theirs: int
    peer: str = "the peer"

    def _message(self) -> str:
        older = self.peer if self.theirs < self.ours else "this node"
        return f"{self.peer} speaks protocol {self.theirs}, this node {self.ours}; upgrade nexar on {older}"


@facts
class DeviceError(NexarError):
    """Staging an array to or from a device failed."""

    device: str
    operation: str
    cause: str

    def _message(self) -> str:
        return (
            f"{self.operation} on device {self.device} failed: {self.cause}; pass a host array to leave the device out"
        )


class InternalError(NexarError):
    """A bug of nexar. Takes what was found to be impossible."""

    def __init__(self, what: str) -> None:
        """`what`: the law that did not hold."""
        super().__init__(f"{what}; this is a bug of nexar, please report it with this traceback")
