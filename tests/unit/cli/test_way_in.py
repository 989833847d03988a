import pytest

from nexar import UsageError
from nexar.cli.way_in import way_in, write_ticket


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


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"missing cannot be read: No such file"):
        way_in(None, tmp_path / "missing")


def test_a_ticket_is_written_for_its_owner_alone(tmp_path):
    write_ticket(tmp_path / "ticket", "nexar1-x")
    assert (tmp_path / "ticket").stat().st_mode & 0o777 == 0o600
    assert way_in(None, tmp_path / "ticket")["ticket"] == "nexar1-x"
    with pytest.raises(UsageError, match="cannot be written"):
        write_ticket(tmp_path / "ticket" / "below a file", "nexar1-x")
