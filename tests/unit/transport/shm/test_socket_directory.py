"""The listener's directory: private, gone afterwards, and swept when its owner died."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nexar.transport.shm.socket_directory import make_socket_directory, remove_stale, why_not_ours


def test_it_can_be_entered_by_its_user_only_and_is_gone_afterwards(tmp_path: Path) -> None:
    place = make_socket_directory(str(tmp_path))
    assert place.directory.stat().st_mode & 0o777 == 0o700
    place.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_holds_is_not(tmp_path: Path) -> None:
    living = make_socket_directory(str(tmp_path))
    program = (
        "import os, signal, socket, sys; from nexar.transport.shm.socket_directory import make_socket_directory\n"
        "place = make_socket_directory(sys.argv[1]); socket.socket(socket.AF_UNIX).bind(place.socket_path)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    remove_stale(tmp_path)
    assert list(tmp_path.iterdir()) == [living.directory]
    living.remove()


def test_a_sweep_touches_nothing_but_our_own_directories(tmp_path: Path) -> None:
    (tmp_path / "nexar-shm-file").touch()
    (tmp_path / "nexar-shm-open").mkdir(mode=0o755)
    (tmp_path / "nexar-shm-link").symlink_to(tmp_path)
    (tmp_path / "other").mkdir(mode=0o700)
    before = sorted(tmp_path.iterdir())
    remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_path_too_long_for_a_socket_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="107 bytes"):
        make_socket_directory(str(tmp_path / ("x" * 100)))


def test_the_longest_path_allowed_can_be_bound(tmp_path: Path) -> None:
    import socket

    base = Path("/tmp") / ("x" * (107 - len("/tmp/") - len("/nexar-shm-12345678/s")))
    base.mkdir(exist_ok=True)
    place = make_socket_directory(str(base))
    assert len(os.fsencode(place.socket_path)) == 107
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(place.socket_path)
    place.remove()
    base.rmdir()


def test_only_the_socket_of_a_listener_of_this_user_is_dialed(tmp_path: Path) -> None:
    place = make_socket_directory(str(tmp_path))
    assert why_not_ours(place.socket_path) is None
    assert why_not_ours("/run/docker.sock") is not None
    assert why_not_ours("/run/docker.sock\0/nexar-shm-x/s") is not None
    assert why_not_ours(str(place.directory / "other")) is not None
    assert why_not_ours(f"nexar-shm-x/{Path(place.socket_path).name}") is not None
    place.directory.chmod(0o755)
    assert "private" in (why_not_ours(place.socket_path) or "")
    place.directory.chmod(0o700)
    link = tmp_path / "nexar-shm-link"
    link.symlink_to(place.directory)
    assert why_not_ours(str(link / "s")) is not None
    place.remove()
