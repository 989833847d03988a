"""The page of a running cluster, in a real browser; and the commands that show the same."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from nexar.cluster.seed_session import ObserverSession
from nexar.config import Config
from nexar.security.invitation import parse_ticket
from nexar.wire.status import StatusPage, StatusReport
from tests.processes.launcher import EVENT_TIMEOUT
from tests.processes.nexar_command import Nexar
from tests.processes.scale import FULL, measured

pytest.importorskip("selenium", reason="selenium is not installed: pip install selenium")

from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

from tests.processes.browser import needs_browser, opened

RANK = Path(__file__).with_name("watched_rank.py")
AWAITED = Path(__file__).with_name("awaited_rank.py")
SCREENSHOT = os.environ.get("NEXAR_SCREENSHOT")
"""Where to keep what the browser shows: docs/images/page.png is made so."""
Found = TypeVar("Found")


def await_value(look: Callable[[], Found | None], what: str) -> Found:
    deadline = time.monotonic() + EVENT_TIMEOUT
    while (found := look()) is None:
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def address_of(run: Nexar) -> str:
    assert run.process.stderr is not None
    line = run.process.stderr.readline()
    assert "the page of this cluster is at http://127.0.0.1:" in line, line
    return line.split()[-1]


def states(browser: WebDriver) -> dict[str, str]:
    script = "return [...document.querySelectorAll('#ranks tr')].map(row => [row.dataset.rank, row.className])"
    return dict(browser.execute_script(script))


def all_busy(browser: WebDriver) -> bool:
    words = browser.execute_script("return document.getElementById('ranks').textContent")
    return len(states(browser)) == 4 and words.count("all_reduce") >= 4 and "B/s" not in words


@needs_browser
def test_a_page_shows_four_ranks_and_one_that_is_killed_turns_red(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    enough = tmp_path / "enough"
    with Nexar("run", "-n", 4, "--on-failure", "continue", "--page", "0", RANK, enough, cwd=tmp_path) as run:
        url = address_of(run)
        with opened(tmp_path / "profile") as browser:
            browser.get(url)
            await_value(lambda: all_busy(browser) or None, "four ranks that work are shown")
            assert {state.split()[0] for state in states(browser).values()} <= {"running", "waiting"}
            victim = pid_of(browser, 2)
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            await_value(lambda: next((s for s in states(browser).values() if "lost" in s), None), "one turns red")
            seconds = time.monotonic() - killed
            measured(record_property, red_after_seconds=round(seconds, 2))
            assert seconds <= (2.0 if FULL else 20.0)
            check_colours(browser)
            if SCREENSHOT:
                time.sleep(1.5)  # for the picture: what the survivors say of themselves after the change
                browser.save_screenshot(SCREENSHOT)
            assert [each for each in logs(browser) if each["level"] == "SEVERE"] == []
            enough.touch()
            assert run.end() == 0, run.stderr
            await_value(lambda: trouble(browser) or None, "the page says that the seed is gone")


def pid_of(browser: WebDriver, rank: int) -> int:
    cells = browser.find_elements(By.CSS_SELECTOR, f"#ranks tr[data-rank='{rank}'] td")
    return int(cells[3].text)


def check_colours(browser: WebDriver) -> None:
    """Red, and not only red: the word is there too."""
    row = browser.find_element(By.CSS_SELECTOR, "#ranks tr.lost td.state")
    assert row.text == "lost"
    red, green, blue = (int(part) for part in row.value_of_css_property("color").strip("rgba()").split(",")[:3])
    assert red > 2 * max(green, blue) or red > 200


def logs(browser: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = browser.get_log("browser")
    return found


def trouble(browser: WebDriver) -> str:
    return browser.find_element(By.ID, "trouble").text


@needs_browser
def test_what_a_member_calls_itself_is_text_in_the_browser(tmp_path: Path) -> None:
    from nexar.observe.page import StatusWebPage
    from tests.unit.observe.boards import HOSTILE, busy

    with (
        StatusWebPage(lambda: busy(lost=True), bytes(32), "127.0.0.1", 0) as page,
        opened(tmp_path / "profile") as browser,
    ):
        browser.get(page.url)
        await_value(lambda: states(browser) or None, "the ranks are shown")
        assert browser.find_elements(By.CSS_SELECTOR, "#ranks img") == []
        assert HOSTILE in browser.find_element(By.ID, "ranks").text
        assert "straggler" in states(browser)["1"]
        assert [each for each in logs(browser) if each["level"] == "SEVERE"] == []
        browser.get(page.url.rsplit("/", 2)[0])
        assert "needs its key" in browser.find_element(By.TAG_NAME, "body").text


def test_the_board_says_who_waits_for_whom_and_who_is_stopped(tmp_path: Path) -> None:
    enough, ticket = tmp_path / "enough", tmp_path / "ticket"
    arguments = ("run", "-n", 3, "--write-ticket", ticket, AWAITED, enough)
    with Nexar(*arguments, cwd=tmp_path, NEXAR_HEARTBEAT_TIMEOUT_SECS="60") as run:  # nobody is to be expelled for it
        await_value(lambda: ticket.exists() or None, "the ticket is written")
        with ObserverSession(parse_ticket(ticket.read_text().strip()), Config(transports=("tls",))) as onlooker:

            def seen() -> dict[int, tuple[str, StatusReport]]:
                return {
                    row.rank: (row.state, row.bulletin)
                    for row in onlooker.read_board().rows
                    if row.bulletin is not None
                }

            def waiting() -> dict[int, tuple[str, StatusReport]] | None:
                found = seen()
                return (
                    found if [found[rank][0] for rank in sorted(found)] == ["waiting", "running", "waiting"] else None
                )

            found = await_value(waiting, "two wait, and one does not")
            assert [found[rank][1].waiting_for for rank in range(3)] == [(1,), (), (1,)]
            assert found[0][1].operation == "all_reduce #0"
            if FULL:  # three bulletins must be missing
                os.kill(found[2][1].pid, signal.SIGSTOP)
                await_value(lambda: seen()[2][0] == "stuck" or None, "who is stopped is stuck")
                os.kill(found[2][1].pid, signal.SIGCONT)
            enough.touch()
            assert run.end() == 0, run.stderr


def all_called(board: StatusPage) -> bool:
    return len(board.rows) == 2 and all(row.bulletin is not None and row.bulletin.calls for row in board.rows)


@pytest.mark.full
def test_status_and_top_show_a_run_whose_ticket_they_have(tmp_path: Path) -> None:
    enough, ticket = tmp_path / "enough", tmp_path / "ticket"
    with Nexar("run", "-n", 2, "--write-ticket", ticket, RANK, enough, cwd=tmp_path) as run:
        await_value(lambda: ticket.exists() or None, "the ticket is written")
        assert ticket.stat().st_mode & 0o777 == 0o600

        with ObserverSession(parse_ticket(ticket.read_text().strip()), Config(transports=("tls",))) as onlooker:
            await_value(lambda: all_called(onlooker.read_board()) or None, "two ranks that have called something")
        with Nexar("status", "--ticket-file", ticket, "--json", cwd=tmp_path) as status:
            assert status.end() == 0, status.stderr
        facts = json.loads(status.stdout)
        assert [each["rank"] for each in facts["ranks"]] == [0, 1]
        assert facts["ranks"][0]["carriers"]
        with Nexar("top", "--ticket-file", ticket, "--json", "--count", 2, "--interval", 1.5, cwd=tmp_path) as top:
            assert top.end() == 0, top.stderr
        assert json.loads(top.stdout.splitlines()[-1])["ranks"][0]["calls_rate"] > 0
        enough.touch()
        assert run.end() == 0, run.stderr
    assert not ticket.exists()
    with Nexar("status", "--ticket-file", ticket, cwd=tmp_path) as late:
        assert late.end() == 2
    assert "the run that wrote it has ended" in late.stderr
