import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nexar import UsageError
from nexar.cli.way_in import ticket_in, way_in


def test_what_is_given_replaces_every_other_way_in(tmp_path):
    file = tmp_path / "ticket"
    file.write_text("nexar1-x\n")
    file.chmod(0o600)
    assert way_in("nexar1-y", None) == {"ticket": "nexar1-y", "seed": None}
    assert way_in(None, file) == {"ticket": "nexar1-x", "seed": None}
    assert way_in(None, None, "a:1") == {"seed": "a:1", "ticket": None}
    assert way_in(None, None) == {}


def test_two_ways_at_once_are_refused(tmp_path):
    with pytest.raises(UsageError, match="give one of them"):
        way_in("nexar1-x", tmp_path / "ticket")


def test_a_file_that_is_not_there_is_named_with_the_remedy(tmp_path):
    with pytest.raises(UsageError, match=r"missing cannot be read: No such file.*; name the file that `nexar seed"):
        way_in(None, tmp_path / "missing")


def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path, monkeypatch):
    waiting = threading.Event()
    monkeypatch.setattr("nexar.cli.way_in.complain", lambda _: waiting.set())
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(way_in, None, tmp_path / "ticket", patience=50)
        assert waiting.wait(50)
        with ticket_in(tmp_path / "ticket", "nexar1-x"):
            assert found.result(timeout=50)["ticket"] == "nexar1-x"


def test_a_file_that_does_not_come_is_not_waited_for_for_ever(tmp_path):
    with pytest.raises(UsageError, match=r"missing cannot be read: No such file"):
        way_in(None, tmp_path / "missing", patience=0.01)


def test_a_ticket_is_written_for_its_owner_alone_and_goes_with_its_seed(tmp_path):
    with ticket_in(tmp_path / "ticket", "nexar1-x"):
        assert (tmp_path / "ticket").stat().st_mode & 0o777 == 0o600
        assert way_in(None, tmp_path / "ticket")["ticket"] == "nexar1-x"
        with (
            pytest.raises(UsageError, match="cannot be written"),
            ticket_in(tmp_path / "ticket" / "below a file", "nexar1-x"),
        ):
            pass
    assert not (tmp_path / "ticket").exists()


def test_a_ticket_stays_if_its_cluster_does(tmp_path):
    with ticket_in(tmp_path / "ticket", "nexar1-x", keep=True):
        pass
    assert way_in(None, tmp_path / "ticket")["ticket"] == "nexar1-x"


def test_the_ticket_of_another_seed_is_left_alone(tmp_path):
    with ticket_in(tmp_path / "ticket", "nexar1-x"), ticket_in(tmp_path / "ticket", "nexar1-y", keep=True):
        pass
    assert way_in(None, tmp_path / "ticket")["ticket"] == "nexar1-y"


def test_a_ticket_that_was_taken_away_already_is_no_fault(tmp_path):
    with ticket_in(tmp_path / "ticket", "nexar1-x"):
        (tmp_path / "ticket").unlink()
