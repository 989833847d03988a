from nexar.cli.options import as_variables, elastic_settings
from nexar.environment import effective


def test_options_that_were_not_given_leave_the_settings_alone():
    assert elastic_settings(elastic=False, least=None, most=None) == {}


def test_options_become_settings_and_settings_become_variables():
    given = elastic_settings(elastic=True, least=2, most=5)
    assert effective(environ=as_variables(given)).config == effective(given, {}).config
    assert as_variables(given)["NEXAR_ELASTIC_ENABLED"] == "true"
