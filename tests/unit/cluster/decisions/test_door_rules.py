from nexar.cluster.decisions.door_rules import DoorRules


def test_without_a_word_a_cluster_is_not_elastic_and_has_no_limit_of_its_own() -> None:
    assert (DoorRules().elastic, DoorRules().most) == (False, 0)
