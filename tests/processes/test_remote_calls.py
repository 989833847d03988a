"""Remote calls between real processes, of which one is killed in mid-call."""

from pathlib import Path

import pytest

from tests.processes.nexar_command import Nexar

RANK = Path(__file__).with_name("remote_calls_rank.py")


@pytest.mark.full
@pytest.mark.parametrize(
    ("transports", "policy"),
    [("shm,tls", "manual"), ("tls", "manual"), ("shm,tls", "automatic"), ("quic", "automatic")],
)
def test_a_call_of_a_process_that_is_killed_raises_at_once_and_the_caller_lives_on(
    transports: str, policy: str, tmp_path: Path
) -> None:
    with Nexar(
        "run",
        "-n",
        2,
        "--on-failure",
        "continue",
        RANK,
        policy,
        cwd=tmp_path,
        NEXAR_TRANSPORTS=transports,
        PYTHONWARNINGS="error",
    ) as running:
        assert running.end() == 0, running.stderr
    assert "lost and alive" in running.stdout
    assert "did not return" in running.stderr  # the log names the function that never returns
