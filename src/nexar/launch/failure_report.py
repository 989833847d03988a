"""What a launcher writes to standard error about ranks that failed."""

from collections.abc import Sequence

from nexar.launch.output import Console
from nexar.launch.stop_policy import Failure


class FailureReport:
    """One run. The culprit is written with its traceback, ranks that failed because of it in one line each."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._texts: dict[str, str] = {}  # tracebacks that nobody has seen yet, by rank
        self._exceptions: dict[str, str] = {}  # names of their classes, by rank
        self._folded: dict[str, str] = {}  # lines that follow the report of the culprit, by rank
        self._culprit: Failure | None = None

    def keep(self, failure: Failure, text: str, exception: str) -> None:
        """A rank failed. `text`: its traceback, if it was not shown; `exception`: the name of its class."""
        self._texts[failure.who], self._exceptions[failure.who] = text, exception
        if failure.consequence and text:
            self._folded[failure.who] = f"{failure.who} {failure.cause}: {exception}"
        self._write_folded()

    def report(self, failure: Failure) -> None:
        """This is the culprit, as far as is known."""
        self._culprit = failure
        self._folded.pop(failure.who, None)
        text = self._texts.pop(failure.who, "").rstrip()
        where = f" on {failure.host}" if failure.host else ""
        self.say(f"{failure.who}{where} {failure.cause}, the first to fail" + (f":\n{text}" if text else ""))
        self._write_folded()

    def _write_folded(self) -> None:
        if self._culprit is None:
            return
        culprit = self._culprit.who
        for who, words in self._folded.items():
            same = self._exceptions[who] == self._exceptions.get(culprit)
            self.say(f"{words}, as on {culprit}" if same else f"{words}, because {culprit} failed")
        self._folded.clear()

    def stopping(self, names: Sequence[str], seconds: float) -> None:
        """These ranks did not end by themselves."""
        self.say(f"stopping {', '.join(names)}: not ended {seconds:g} s after the failure")

    def interrupted(self, signal_name: str, seconds: float) -> None:
        """The launcher was asked to stop."""
        self.say(f"{signal_name}: stopping all ranks; they have {seconds:g} s to end")

    def say(self, words: str) -> None:
        """A line of the launcher itself."""
        self._console.write("stderr", f"nexar: {words}\n".encode())
