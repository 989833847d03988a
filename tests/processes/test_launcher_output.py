"""What ranks print: whose it is, whole lines, files, filters."""

import pytest

from tests.processes.launcher import Launch, await_gone, launch, script

GREETING = "print('hello from', rank); print('trouble', file=sys.stderr)"


def test_every_line_says_whose_it_is_and_streams_stay_apart(tmp_path):
    ran = launch("run", "-n", 2, script(tmp_path, GREETING), cwd=tmp_path)
    assert ran.process.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]
    assert sorted(ran.stderr.splitlines()) == ["[rank 0] trouble", "[rank 1] trouble"]


def test_lines_of_different_ranks_never_mix(tmp_path):
    text = "for number in range(300):\n    for part in ('a' * 50, 'b' * 50, '\\n'): sys.stdout.write(part)"
    ran = launch("run", "-n", 3, script(tmp_path, text), cwd=tmp_path)
    assert ran.process.returncode == 0, ran.stderr
    expected = {f"[rank {rank}] " + "a" * 50 + "b" * 50 for rank in range(3)}
    assert set(ran.stdout.splitlines()) == expected
    assert len(ran.stdout.splitlines()) == 900


def test_much_output_comes_whole(tmp_path):
    ran = launch("run", "-n", 1, script(tmp_path, "sys.stdout.write(('z' * 99 + '\\n') * 20000)"), cwd=tmp_path)
    assert ran.stdout == f"[rank 0] {'z' * 99}\n" * 20000


def test_the_last_line_may_lack_its_end(tmp_path):
    ran = launch("run", "-n", 1, script(tmp_path, "sys.stdout.write('no newline')"), cwd=tmp_path)
    assert ran.stdout == "[rank 0] no newline\n"


def test_arguments_reach_the_script_as_they_are(tmp_path):
    ran = launch("run", "-n", 1, script(tmp_path, "print(sys.argv[1:])"), "-n", "7", "--tee", "--", "x", cwd=tmp_path)
    assert ran.stdout == "[rank 0] ['-n', '7', '--tee', '--', 'x']\n"


def test_a_module_is_run(tmp_path):
    script(tmp_path, "print(__name__, sys.argv[1:])", "some_module.py")
    ran = launch("run", "-n", 1, "-m", "some_module", "--flag", cwd=tmp_path)
    assert ran.stdout == "[rank 0] __main__ ['--flag']\n"


def test_a_program_that_is_not_python_is_run(tmp_path):
    ran = launch("run", "-n", 2, "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE", cwd=tmp_path)
    assert sorted(ran.stdout.splitlines()) == ["[rank 0] 0 of 2", "[rank 1] 1 of 2"]


def test_ranks_find_the_names_torchrun_sets(tmp_path):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR"
    ran = launch("run", "-n", 2, script(tmp_path, f"print(*[os.environ[n] for n in '{names}'.split()])"), cwd=tmp_path)
    lines = ["[rank 0] 0 0 2 2 0 1 127.0.0.1", "[rank 1] 1 1 2 2 0 1 127.0.0.1"]
    assert sorted(ran.stdout.splitlines()) == lines


def test_log_files_replace_the_console(tmp_path):
    ran = launch("run", "-n", 2, "--log-dir", "logs/here", script(tmp_path, GREETING), cwd=tmp_path)
    assert (ran.stdout, ran.stderr) == ("", "")
    logs = tmp_path / "logs" / "here"
    found = {path.name: path.read_text() for path in logs.iterdir()}
    assert found == {
        "rank_0.stdout.log": "hello from 0\n",
        "rank_0.stderr.log": "trouble\n",
        "rank_1.stdout.log": "hello from 1\n",
        "rank_1.stderr.log": "trouble\n",
    }


def test_tee_writes_to_both(tmp_path):
    ran = launch("run", "-n", 1, "--log-dir", "logs", "--tee", script(tmp_path, GREETING), cwd=tmp_path)
    assert ran.stdout == "[rank 0] hello from 0\n"
    assert (tmp_path / "logs" / "rank_0.stdout.log").read_text() == "hello from 0\n"


def test_only_chosen_ranks_are_shown(tmp_path):
    ran = launch("run", "-n", 3, "--local-ranks-filter", "0,2", script(tmp_path, GREETING), cwd=tmp_path)
    assert sorted(ran.stdout.splitlines()) == ["[rank 0] hello from 0", "[rank 2] hello from 2"]


def test_a_rank_that_is_not_shown_and_fails_is_shown_at_the_end(tmp_path):
    text = "if rank == 1: raise ValueError('on purpose')"
    ran = launch("run", "-n", 2, "--local-ranks-filter", "0", script(tmp_path, text), cwd=tmp_path)
    assert ran.process.returncode == 1
    assert ran.stderr.splitlines()[-1] == "ValueError: on purpose"


def test_a_reader_that_goes_away_ends_the_run(tmp_path):
    """It may end while a rank only begins: a file that is there is whole."""
    reported = "Path(f'draft{rank}').write_text(str(os.getpid()))\nPath(f'draft{rank}').rename(f'pid{rank}')\n"
    text = reported + "while True: print('y'); time.sleep(0.001)"
    with Launch("run", "-n", 2, script(tmp_path, text), cwd=tmp_path) as running:
        assert running.process.stdout.readline().endswith("] y\n")
        running.process.stdout.close()
        running.process.stdout = None
        assert running.end() == 128 + 13
    for path in tmp_path.glob("pid*"):
        await_gone(int(path.read_text()))


@pytest.mark.parametrize("name", ["NEXAR_TICKET", "NEXAR_LAUNCHER", "NEXAR_LAUNCH"])
def test_a_launcher_inside_a_rank_makes_a_cluster_of_its_own(tmp_path, name):
    inner = script(tmp_path, f"print(os.environ['{name}'], os.environ['WORLD_SIZE'])", "inner.py")
    ran = launch("run", "-n", 1, inner, cwd=tmp_path, NEXAR_LAUNCH="outer", NEXAR_LAUNCHER="0" * 16, NEXAR_TICKET="bad",
                 RANK="5", WORLD_SIZE="9")  # fmt: skip
    assert ran.process.returncode == 0, ran.stderr
    value, size = ran.stdout.removeprefix("[rank 0] ").split()
    assert value not in {"outer", "0" * 16, "bad"}
    assert size == "1"


def test_a_process_that_left_its_rank_and_keeps_writing_does_not_delay_the_end(tmp_path):
    text = """
import subprocess
writer = subprocess.Popen(["yes"], start_new_session=True)
Path("writer").write_text(str(writer.pid))
"""
    try:
        ran = launch("run", "-n", 1, script(tmp_path, text), cwd=tmp_path)
    finally:
        await_gone(int((tmp_path / "writer").read_text()))
    assert ran.process.returncode == 0, ran.stderr
