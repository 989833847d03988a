import io
import threading
from contextlib import redirect_stderr

import pytest

from nexar.cli.progress_bar import advancing, counting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_where_nobody_looks_nothing_is_shown_and_no_thread_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with advancing("measuring", 3) as advance, counting("members", 2, lambda: 1 // 0):
        advance("all_reduce")
        assert threading.active_count() == before
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_how_far_it_is_and_what_is_done() -> None:
    with redirect_stderr(Terminal()) as terminal, advancing("measuring", 3) as advance:
        advance("all_reduce [red]")
        advance("barrier")
    text = terminal.getvalue()
    assert "0/3" in text
    assert "2/3" in text
    assert "all_reduce [red]" in text


def test_a_count_is_followed_until_the_block_ends() -> None:
    seen = threading.Event()

    def look() -> int:
        seen.set()
        return 2

    with redirect_stderr(Terminal()) as terminal, counting("members", 4, look):
        assert seen.wait(20)
    assert "2/4" in terminal.getvalue()
    assert not any(thread.name == "nexar-progress" for thread in threading.enumerate())
