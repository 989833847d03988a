import pytest

from nexar import ConfigError, UsageError
from nexar.launch.detect import detect
from nexar.launch.plan import Command, HostBlock, choose_form, parse_filter, plan_ranks, without_outer_launch

BLOCK = HostBlock(
    count=2, first_rank=4, size=6, group_rank=2, launcher=0xABC, master_addr="10.0.0.1", master_port=29501
)  # fmt: skip
SCRIPT = Command("script", "train.py", ("--lr", "0.1"))


def plans(block=BLOCK, command=SCRIPT, inherited=(), entry=(("NEXAR_TICKET", "T"),)):
    return plan_ranks(
        block, command, python="python3", inherited=dict(inherited), entry=dict(entry), mark="0123"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("script", ("python3", "-u", "train.py", "--lr", "0.1")),
        ("module", ("python3", "-u", "-m", "train.py", "--lr", "0.1")),
        ("program", ("train.py", "--lr", "0.1")),
    ],
)
def test_each_form_has_its_command_line(form, line):
    assert Command(form, "train.py", ("--lr", "0.1")).line("python3") == line


def test_every_rank_gets_the_names_torchrun_sets():
    environment = plans()[1].environment
    assert {name: environment[name] for name in environment if not name.startswith("NEXAR_")} == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29501",
    }


def test_what_is_planned_is_what_a_rank_detects():
    start = detect(plans()[0].environment)
    assert (start.kind, start.rank, start.size, start.local_rank, start.local_size) == ("nexar", 4, 6, 0, 2)
    assert (start.launcher, start.master_port) == (0xABC, 29501)


def test_the_inherited_environment_is_kept_and_other_ways_in_are_not():
    inherited = {"PATH": "/bin", "NEXAR_PORT_RANGE": "1-9", "NEXAR_SEED": "old:1", "NEXAR_CLUSTER_TOKEN": "old"}
    environment = plans(inherited=inherited)[0].environment
    assert (environment["PATH"], environment["NEXAR_PORT_RANGE"], environment["NEXAR_TICKET"]) == ("/bin", "1-9", "T")
    assert "NEXAR_SEED" not in environment
    assert "NEXAR_CLUSTER_TOKEN" not in environment


def test_a_plan_does_not_show_its_ticket():
    assert "secret" not in repr(plans(entry={"NEXAR_TICKET": "secret"}))


def test_lines_and_log_files_are_named_after_the_rank():
    assert plans()[1].prefix == "[rank 5] "
    assert plans()[1].log_name("stderr") == "rank_5.stderr.log"


def test_hosts_with_fewer_ranks_are_counted_too():
    last = HostBlock(count=3, first_rank=4, size=7, group_rank=3, launcher=1, master_addr="a", master_port=1)
    assert last.group_size == 4


def test_without_a_filter_all_ranks_are_shown():
    assert parse_filter(None, 3) == {0, 1, 2}


def test_a_filter_chooses_local_ranks():
    assert parse_filter(" 0, 2", 3) == {0, 2}


@pytest.mark.parametrize("text", ["3", "a", "", "0,,1", "-1", "0;1"])
def test_a_filter_of_ranks_that_are_not_there_is_refused(text):
    with pytest.raises(ConfigError, match="from 0 to 2"):
        parse_filter(text, 3)


@pytest.mark.parametrize(
    ("module", "no_python", "form"), [(False, False, "script"), (True, False, "module"), (False, True, "program")]
)
def test_the_options_choose_the_form(module, no_python, form):
    assert choose_form(module=module, no_python=no_python) == form


def test_a_module_is_always_python():
    with pytest.raises(UsageError, match="give one of them"):
        choose_form(module=True, no_python=True)


def test_a_launcher_inside_a_rank_forgets_the_outer_cluster():
    assert without_outer_launch(plans(inherited={"PATH": "/bin"})[0].environment) == {"PATH": "/bin"}


def test_a_launcher_outside_keeps_the_ticket_it_was_given():
    given = {"NEXAR_TICKET": "T", "RANK": "0"}
    assert without_outer_launch(given) == given


# -- without a rank ----------------------------------------------------------------------------------------------------


def test_who_joins_a_cluster_that_has_formed_gets_no_rank_and_detects_none():
    late = HostBlock(count=2, first_rank=None, size=6, launcher=0xABC, master_addr="10.0.0.1", master_port=29501)
    plan = plans(block=late, inherited={"SLURM_PROCID": "3", "WORLD_SIZE": "9"})[1]
    assert plan.joins
    assert (plan.rank, plan.name, plan.prefix) == (None, "joiner 1", "[joiner 1] ")
    assert detect(plan.environment) is None
    assert (plan.environment["LOCAL_RANK"], plan.environment["NEXAR_TICKET"]) == ("1", "T")
    assert not {"RANK", "WORLD_SIZE", "GROUP_RANK", "NEXAR_LAUNCHER"} & set(plan.environment)
    assert without_outer_launch(plan.environment).keys() == {"SLURM_PROCID"}


def test_who_is_started_again_keeps_its_rank_until_the_cluster_has_formed():
    first = plans()[1]
    second = first.replacement_plan(as_joiner=False)
    assert (second.environment, second.joins) == (first.environment, False)
    third = second.replacement_plan(as_joiner=True)
    assert detect(third.environment) is None
    assert (third.name, third.rank) == ("rank 5 restart 2", 5)
    assert third.log_name("stdout") == "rank_5_restart_2.stdout.log"
