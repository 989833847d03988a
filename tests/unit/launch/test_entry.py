import pytest

from nexar import Config, ConfigError, UsageError
from nexar.launch.detect import LaunchInfo
from nexar.launch.entry import ByFile, BySeedOfRankZero, ByTicket, ByToken, choose_entry, rank_zero_port

TOKEN = "5f1d7c0a93be48e2a6d4c8f07b3e9a15"
SECRET = Config(cluster_token=TOKEN)


def start(rank=0, size=4, local_size=2, **facts):
    known = {"kind": "torch", "local_rank": 0, "master_addr": "node1", "master_port": 29500, "job": "j"}
    return LaunchInfo(rank=rank, size=size, local_size=local_size, **{**known, **facts})


@pytest.mark.parametrize("launcher", [None, start(), start(local_size=4)])
def test_a_ticket_selects_its_entry_whoever_started_the_process(launcher):
    assert choose_entry(launcher, Config(ticket="T", cluster_token=TOKEN, seed="a:1"), 1) == ByTicket("T")


@pytest.mark.parametrize("launcher", [None, start(), start(local_size=4)])
def test_the_token_and_the_address_of_the_seed_select_an_entry_too(launcher):
    assert choose_entry(launcher, Config(cluster_token=TOKEN, seed="a:1"), 1) == ByToken(TOKEN, "a:1")


def test_all_ranks_on_one_host_meet_at_a_file_and_rank_0_opens():
    entries = [choose_entry(start(rank, 2, 2, local_rank=rank), Config(), 1) for rank in range(2)]
    assert [door.starts_seed for door in entries] == [True, False]
    assert entries[0] == ByFile(entries[1].name, 2, True)


def test_two_jobs_have_two_files():
    names = {choose_entry(start(0, 2, 2, job=job), Config(), 1).name for job in "ab"}
    assert len(names) == 2


def test_without_an_identity_of_the_job_the_parent_process_distinguishes_jobs():
    one, other, again = (choose_entry(start(0, 2, 2, job=None), Config(), parent).name for parent in (1, 2, 1))
    assert one == again != other


def test_ranks_on_several_hosts_meet_at_the_host_of_rank_0_and_rank_0_opens():
    assert choose_entry(start(3), SECRET, 1) == BySeedOfRankZero(TOKEN, "node1", 29501, 4, False)
    assert choose_entry(start(0), SECRET, 1).starts_seed


@pytest.mark.parametrize(
    ("config", "master_port", "port"),
    [
        (Config(), 29500, 29501),
        (Config(), 65535, 65534),
        (Config(port=4000), 29500, 4001),
        (Config(port=4000, port_range=(5000, 5100)), 29500, 5100),
    ],
)
def test_the_port_of_the_seed_is_one_that_nobody_else_takes(config, master_port, port):
    assert rank_zero_port(start(master_port=master_port), config) == port


def test_without_any_port_the_job_decides_and_all_its_ranks_agree():
    ports = {rank_zero_port(start(rank, master_port=None), Config()) for rank in range(4)}
    assert len(ports) == 1
    assert ports.pop() in range(20_000, 30_000)


def test_without_an_identity_the_port_is_the_usual_one():
    assert rank_zero_port(start(kind="kubernetes", master_port=None, job=None), Config()) == 29501


def test_several_hosts_without_a_token_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match="token_hex") as caught:
        choose_entry(start(), Config(), 1)
    assert caught.value.variable == "NEXAR_CLUSTER_TOKEN"


def test_a_seed_without_a_token_is_refused():
    with pytest.raises(ConfigError, match="needed with NEXAR_SEED"):
        choose_entry(None, Config(seed="a:1"), 1)


def test_a_token_without_a_seed_is_refused():
    with pytest.raises(ConfigError) as caught:
        choose_entry(None, SECRET, 1)
    assert caught.value.variable == "NEXAR_SEED"


def test_an_unknown_host_of_rank_0_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match="nexar seed") as caught:
        choose_entry(start(kind="pmi", local_size=None, master_addr=None), SECRET, 1)
    assert caught.value.variable == "MASTER_ADDR"


def test_a_child_of_ours_without_its_ticket_is_notified_what_happened():
    with pytest.raises(ConfigError, match="do not clear it"):
        choose_entry(start(kind="nexar"), Config(), 1)


def test_a_process_that_nobody_started_is_notified_how_to_start_it():
    with pytest.raises(UsageError, match="nexar run -n 4"):
        choose_entry(None, Config(), 1)


def test_entries_do_not_show_secrets():
    entries = [ByTicket("secret"), ByToken("secret", "a:1"), BySeedOfRankZero("secret", "a", 1, 2, True)]
    assert "secret" not in repr(entries)
