from nexar.cluster.decisions.terms import Terms


def test_without_a_word_a_cluster_is_not_elastic_and_has_no_limit_of_its_own() -> None:
    assert (Terms().elastic, Terms().most) == (False, 0)
