import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.cli.valid_sets import parse_sets


def test_patterns_may_have_commas_and_equals_signs():
    sets = parse_sets("a = x.csv,y.csv ; b_2:05=digits://split=test;")
    assert sets == {"a": ("x.csv,y.csv", 1), "b_2": ("digits://split=test", 5)}
    assert parse_sets(None) == {}


@pytest.mark.parametrize("text", ["a", "a=", "=x", "a:0=x", "a:b=x", "a:-1=x", "a/b=x", "a=x; é=y"])
def test_malformed_entries_are_named(text):
    with pytest.raises(UsageError, match=f"NAME=PATTERN.*got '{text.split('; ')[-1]}'"):
        parse_sets(text)


def test_names_are_unique():
    with pytest.raises(UsageError, match="two sets with the name a"):
        parse_sets("a=x; a:2=y")
