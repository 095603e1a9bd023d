from tekoa import combinator
from tekoa.extensions import base


def test_the_stages_are_put_together_by_the_same_functions():
    assert combinator.serial is base.serial
    assert combinator.when is base.when
