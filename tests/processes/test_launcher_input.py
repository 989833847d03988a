"""Wrong input: one clear message, the right exit code, no traceback of ours."""

import json
import stat

import pytest

from tests.processes.launcher import launch, script

HURRY = {"NEXAR_FORMATION_TIMEOUT_SECS": "0.1"}
TOKEN = "5f1d7c0a93be48e2a6d4c8f07b3e9a15"


def refused(tmp_path, *arguments, **variables):
    ran = launch(*arguments, cwd=tmp_path, **variables)
    assert ran.process.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""
    return ran.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["-n", "0", "script.py"], {}, "-n = 0 is refused; allowed: a whole number, 1 or more"),
        (["-n", "many", "script.py"], {}, "-n"),
        (["-n", "1"], {}, "SCRIPT"),
        (["-n", "1", "missing.py"], {}, "the script missing.py does not exist"),
        (["-n", "1", "-m", "missing_module.x"], {}, "there is no module missing_module.x"),
        (["-n", "1", "--no-python", "missing-program"], {}, "the program missing-program does not exist"),
        (["-n", "1", "-m", "--no-python", "x"], {}, "give one of them"),
        (["-n", "1", "--ticket", "nonsense", "script.py"], {}, "ticket"),
        (["-n", "1", "--ticket", "T", "--seed", "a:1", "script.py"], {}, "give one of them"),
        (["-n", "1", "--ticket-file", "missing", "script.py"], HURRY, "--ticket-file missing cannot be read: No such"),
        (["-n", "1", "--seed", "a:1", "script.py"], {}, "NEXAR_CLUSTER_TOKEN"),
        (["-n", "1", "--seed", "a", "script.py"], {"NEXAR_CLUSTER_TOKEN": TOKEN}, "NEXAR_SEED"),
        (["-n", "2", "--local-ranks-filter", "2", "script.py"], {}, "from 0 to 1"),
        (["-n", "1", "--log-dir", "script.py/x", "script.py"], {}, "cannot be made"),
        (["-n", "1", "--min", "3", "--max", "2", "script.py"], {}, "NEXAR_ELASTIC_MIN_WORLD_SIZE"),
        (["-n", "1", "--min", "1", "script.py"], {}, "--min = 1 is refused; allowed: only in an elastic"),
        (["-n", "1", "--max", "2", "script.py"], {}, "--max = 2 is refused; allowed: only in an elastic"),
        (["-n", "1", "script.py"], {"NEXAR_TOPOLOGY": "donut"}, "NEXAR_TOPOLOGY = 'donut' is refused"),
        (["-n", "1", "script.py"], {"NEXAR_PORT": "abc"}, "NEXAR_PORT = 'abc' is refused"),
        (["-n", "1", "script.py"], {"NEXAR_PROT": "1"}, "did you mean NEXAR_PORT"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_work_is_refused_before_it_starts(tmp_path, arguments, variables, words):
    script(tmp_path, "Path('ran').touch()")
    assert words in refused(tmp_path, "run", *arguments, **variables)
    assert not (tmp_path / "ran").exists()


def test_a_program_that_cannot_be_executed_is_named(tmp_path):
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF nonsense")
    broken.chmod(0o755)
    assert "rank 0 cannot be started" in refused(tmp_path, "run", "-n", 2, "--no-python", broken)


def test_a_ticket_is_never_shown_in_an_error(tmp_path):
    script(tmp_path, "")
    assert "nexar1_secret" not in refused(tmp_path, "run", "-n", 1, "--ticket", "nexar1_secret", "script.py")


def test_a_seed_of_nobody_is_refused(tmp_path):
    assert "--size = 0 is refused" in refused(tmp_path, "seed", "--size", 0)


def test_a_seed_that_is_not_elastic_takes_no_smallest_world(tmp_path):
    assert "--min = 1 is refused" in refused(tmp_path, "seed", "--size", 2, "--min", 1)


def test_the_ticket_goes_to_standard_output_and_nothing_else_does(tmp_path):
    ran = launch("seed", "--size", 2, cwd=tmp_path)
    assert ran.process.returncode == 0
    assert ran.stdout.startswith("nexar1_")
    assert ran.stdout.count("\n") == 1
    assert ran.stdout.strip() not in ran.stderr
    assert "the seed listens at 127.0.0.1:4000" in ran.stderr


def test_the_ticket_goes_to_a_file_of_its_owner(tmp_path):
    ran = launch("seed", "--size", 2, "--ticket-file", "ticket", "--state-dir", "state", cwd=tmp_path)
    assert ran.stdout == ""
    assert (tmp_path / "ticket").read_text().startswith("nexar1_")
    assert stat.S_IMODE((tmp_path / "ticket").stat().st_mode) == 0o600


def test_the_ticket_of_a_seed_that_has_ended_is_not_left_for_others_to_try(tmp_path):
    assert launch("seed", "--size", 2, "--ticket-file", "ticket", cwd=tmp_path).process.returncode == 0
    assert not (tmp_path / "ticket").exists()


def test_a_ticket_file_lets_a_host_in(tmp_path):
    launch("seed", "--size", 2, "--ticket-file", "ticket", "--state-dir", "state", cwd=tmp_path)
    text = "print(os.environ['NEXAR_TICKET'] == Path('ticket').read_text().strip(), rank, os.environ['MASTER_PORT'])"
    ran = launch("run", "--ticket-file", "ticket", "--first-rank", 3, script(tmp_path, text), cwd=tmp_path)
    assert ran.stdout == "[rank 3] True 3 4001\n"


def test_with_a_token_no_ticket_is_shown(tmp_path):
    assert launch("seed", "--size", 2, cwd=tmp_path, NEXAR_CLUSTER_TOKEN=TOKEN).stdout == ""


def test_a_token_and_the_address_of_a_seed_let_a_host_in(tmp_path):
    text = "print(os.environ['NEXAR_SEED'], 'NEXAR_TICKET' in os.environ, len(os.environ['NEXAR_CLUSTER_TOKEN']))"
    ran = launch("run", "--seed", "[::1]:4000", script(tmp_path, text), cwd=tmp_path, NEXAR_CLUSTER_TOKEN=TOKEN)
    assert ran.stdout == "[rank 0] [::1]:4000 False 32\n"


def test_options_reach_the_ranks_as_settings(tmp_path):
    text = "print({name: text for name, text in os.environ.items() if 'ELASTIC' in name})"
    ran = launch("run", "--elastic", "--min", 2, "--max", 5, script(tmp_path, text), cwd=tmp_path)
    for words in ("'NEXAR_ELASTIC_ENABLED': 'true'", "MIN_WORLD_SIZE': '2'", "MAX_WORLD_SIZE': '5'"):
        assert words in ran.stdout


def test_the_settings_in_force_are_printed_with_their_origin_and_without_secrets(tmp_path):
    ran = launch("config", cwd=tmp_path, NEXAR_PORT="4000", NEXAR_CLUSTER_TOKEN=TOKEN)
    lines = {line.split()[0]: line.split()[1:] for line in ran.stdout.splitlines()}
    assert lines["NEXAR_PORT"] == ["4000", "NEXAR_PORT"]
    assert lines["NEXAR_TOPOLOGY"] == ["full_mesh", "default"]
    assert lines["NEXAR_CLUSTER_TOKEN"] == ["<secret>", "NEXAR_CLUSTER_TOKEN"]
    assert TOKEN not in ran.stdout


def test_programs_read_the_settings_as_json(tmp_path):
    ran = launch("config", "--json", cwd=tmp_path, NEXAR_RPC_TIMEOUT_SECS="2.5", NEXAR_CLUSTER_TOKEN=TOKEN)
    facts = {fact["name"]: fact for fact in json.loads(ran.stdout)}
    assert facts["rpc_timeout"] == {
        "name": "rpc_timeout",
        "variable": "NEXAR_RPC_TIMEOUT_SECS",
        "value": 2.5,
        "unit": "seconds",
        "origin": "NEXAR_RPC_TIMEOUT_SECS",
    }
    assert TOKEN not in ran.stdout
