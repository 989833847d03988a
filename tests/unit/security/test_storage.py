import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from nexar.errors import UsageError
from nexar.security.storage import private_file, read_secret_file, write_private_file, write_secret_file


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_secret_file(tmp_path / "secret", b"first")
    write_secret_file(tmp_path / "secret", b"second")
    assert read_secret_file(tmp_path / "secret") == b"second"
    assert os.listdir(tmp_path) == ["secret"]


def test_only_the_owner_can_read_it_whatever_the_umask_is(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        write_secret_file(tmp_path / "state" / "cluster" / "secret", b"content")
    finally:
        os.umask(old)
    assert mode(tmp_path / "state" / "cluster" / "secret") == 0o600
    assert mode(tmp_path / "state" / "cluster") == mode(tmp_path / "state") == 0o700


def test_a_file_that_was_open_to_others_is_closed_by_writing(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"old")
    (tmp_path / "secret").chmod(0o644)
    write_secret_file(tmp_path / "secret", b"new")
    assert mode(tmp_path / "secret") == 0o600


def test_a_directory_is_no_file_and_nothing_of_it_stays_open(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_secret_file(tmp_path)


def test_what_is_written_piece_by_piece_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    def write(last: bytes) -> None:
        with private_file(tmp_path / "secret") as file:
            file.write(b"one, ")
            if not last:
                raise ValueError("stop")
            file.write(last)

    write(b"two")
    with pytest.raises(ValueError, match="stop"):
        write(b"")
    assert read_secret_file(tmp_path / "secret") == b"one, two"
    assert os.listdir(tmp_path) == ["secret"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    write_secret_file(tmp_path / "secret", b"old")

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="no space"):
        write_secret_file(tmp_path / "secret", b"new")
    monkeypatch.undo()
    assert read_secret_file(tmp_path / "secret") == b"old"
    assert os.listdir(tmp_path) == ["secret"]


def test_the_content_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (steps.append("sync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda one, other: (steps.append("name"), replace(one, other)))
    write_secret_file(tmp_path / "secret", b"content")
    assert steps == ["sync", "name", "sync"]


def test_a_link_is_replaced_and_not_followed_when_writing(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    (tmp_path / "secret").symlink_to(tmp_path / "elsewhere")
    write_secret_file(tmp_path / "secret", b"ours")
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"
    assert read_secret_file(tmp_path / "secret") == b"ours"


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_file_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "my secret"
    path.write_bytes(b"known to all")
    path.chmod(bits)
    with pytest.raises(UsageError) as refusal:
        read_secret_file(path)
    assert f"mode {bits:04o}" in str(refusal.value)
    assert f"chmod 600 '{path}'" in str(refusal.value)
    assert "known to all" not in str(refusal.value)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_secret_file(tmp_path / "secret", b"content")
    owner = (tmp_path / "secret").stat().st_uid
    with tempfile.NamedTemporaryFile(dir=tmp_path) as other:
        if os.geteuid() != 0:
            pytest.skip("giving a file away needs root")
        os.chown(other.name, owner + 4242, -1)
        with pytest.raises(UsageError, match=f"belongs to user {owner + 4242}.*chown {owner}"):
            read_secret_file(Path(other.name))


def test_what_is_no_file_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="not a regular file"):
        read_secret_file(tmp_path / "pipe")


def test_a_missing_file_is_reported_like_any_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_secret_file(tmp_path / "secret")


def test_what_is_private_only_is_written_whole_for_its_owner_and_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise AssertionError("waited for the disk")

    monkeypatch.setattr(os, "fsync", refuse)
    path = tmp_path / "new" / "part"
    write_private_file(path, b"one")
    write_private_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert mode(path) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["part"]
