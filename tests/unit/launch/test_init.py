import os
import signal
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

import nexar.launch.init as init_module
from nexar import Config, ConfigError, InternalError, UsageError
from nexar.collectives import flight_recorder
from nexar.launch.init import connect, init, install_dump_handler
from nexar.launch.plan import MARK_VARIABLE
from nexar.security.invitation import Invitation, format_ticket
from tests.processes import stand_ins
from tests.unit.launch.recorded import recorded


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_the_signal_makes_every_node_of_the_process_write(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def dump_all(reason: str) -> int:
        asked.append(reason)
        return 1

    monkeypatch.setattr(flight_recorder, "dump_all", dump_all)
    install_dump_handler()
    signal.raise_signal(signal.SIGUSR1)
    assert asked == ["SIGUSR1"]


def test_a_handler_of_the_users_stays() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    install_dump_handler()
    signal.raise_signal(signal.SIGUSR1)
    assert seen == [signal.SIGUSR1]
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    install_dump_handler()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_only_the_main_thread_installs_it() -> None:
    thread = threading.Thread(target=install_dump_handler)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_who_was_launched_and_has_no_communicator_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK_VARIABLE, "a launch")
    monkeypatch.setattr(flight_recorder, "dump_all", lambda _: 0)
    install_dump_handler()
    signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL


def test_without_a_communicator_the_signal_does_what_it_did_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(MARK_VARIABLE, raising=False)
    monkeypatch.setattr(flight_recorder, "dump_all", lambda _: 0)
    monkeypatch.setattr(init_module.os, "kill", lambda process, number: sent.append((process, number)))
    install_dump_handler()
    signal.raise_signal(signal.SIGUSR1)
    assert sent == [(os.getpid(), signal.SIGUSR1)]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    monkeypatch.setattr("os.environ", {"PATH": "/bin"})
    monkeypatch.setattr("nexar.environment._taken", {})
    monkeypatch.setattr("nexar.launch.create.bootstrap", stand_ins.stand_in_bootstrap)
    return os.environ


def test_a_child_of_our_launcher_brings_its_rank(environ):
    environ.update(recorded("nexar"), NEXAR_TICKET=stand_ins.TICKET)
    facts = init().facts
    assert (facts["rank"], facts["size"], facts["launcher"]) == (3, 4, 0x00C0FFEE00C0FFEE)


def test_a_process_with_a_ticket_joins_whoever_started_it(environ):
    environ["NEXAR_TICKET"] = stand_ins.TICKET
    communicator = init()
    assert (communicator.rank, communicator.size, communicator.facts["launcher"]) == (None, None, 0)
    assert communicator.invitation.addresses == ("127.0.0.1:4000",)


def test_the_ticket_does_not_stay_in_the_environment_and_init_works_again(environ):
    environ["NEXAR_TICKET"] = stand_ins.TICKET
    first = init()
    assert "NEXAR_TICKET" not in environ
    assert init().invitation == first.invitation


def test_a_ticket_that_is_set_later_replaces_the_one_that_was_taken(environ):
    environ["NEXAR_TICKET"] = stand_ins.TICKET
    init()
    environ["NEXAR_TICKET"] = format_ticket(Invitation(("127.0.0.1:5000",), bytes(32), bytes(32)))
    assert init().invitation.addresses == ("127.0.0.1:5000",)
    assert init().invitation.addresses == ("127.0.0.1:5000",)
    assert "NEXAR_TICKET" not in environ


def test_a_ticket_given_as_a_setting_is_enough():
    assert init(ticket=stand_ins.TICKET).invitation.addresses == ("127.0.0.1:4000",)


def test_settings_win_over_the_config_which_wins_over_the_environment(environ):
    environ.update(NEXAR_TICKET=stand_ins.TICKET, NEXAR_PORT="1", NEXAR_RING_MAX_WORLD="2", NEXAR_RPC_CONCURRENCY="3")
    config = init(Config(port=11, ring_max_world=12), port=21).facts["config"]
    assert (config.port, config.ring_max_world, config.rpc_concurrency) == (21, 12, 3)


def test_connect_asks_nobody_but_the_ticket(environ):
    environ.update(recorded("torchrun"))
    communicator = connect(stand_ins.TICKET, port=7)
    assert (communicator.rank, communicator.facts["config"].port) == (None, 7)


def test_a_wrong_ticket_is_refused():
    with pytest.raises(UsageError):
        connect("nonsense")


def test_a_mistyped_setting_is_refused():
    with pytest.raises(ConfigError, match="did you mean port"):
        init(prt=1)


@pytest.mark.parametrize("config", ["nexar1_abc", {"port": 1}, 4])
def test_what_is_no_config_is_refused_with_the_way_to_say_it(config):
    with pytest.raises(UsageError, match=r"nexar\.Config.*nexar\.connect"):
        init(config)


def test_a_process_that_nobody_started_is_notified_how_to_start_it():
    with pytest.raises(UsageError, match="nexar run"):
        init()


@pytest.mark.parametrize("join", [init, lambda: connect("nonsense")])
def test_an_error_does_not_show_the_way_it_took_through_our_code(join):
    with pytest.raises(UsageError) as raised:
        join()
    ours = [frame for frame in traceback.extract_tb(raised.value.__traceback__) if "/nexar/" in frame.filename]
    assert len(ours) == 1
    assert (raised.value.__cause__, raised.value.__suppress_context__) == (None, True)


def test_a_bug_of_ours_comes_whole(monkeypatch):
    def broken(*_, **__):
        raise InternalError("impossible")

    monkeypatch.setattr("nexar.launch.init.choose_config", broken)
    with pytest.raises(InternalError) as raised:
        init()
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "broken"
