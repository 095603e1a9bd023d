import inspect

import pytest

from tekoa._aliases import accept_aliases


@accept_aliases(output_dir="directory", dir="directory", rnkey="rng")
def function(directory, *, rng=None):
    return directory, rng


def test_both_names_work():
    assert function("a", rng=1) == function(directory="a", rnkey=1) == ("a", 1)
    assert function(dir="a") == function(output_dir="a") == ("a", None)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("a",), {"dir": "b"}),
        ((), {"directory": "a", "dir": "b"}),
        ((), {"dir": 1, "output_dir": 2}),
    ],
)
def test_two_names_for_one_argument_are_an_error(args, kwargs):
    with pytest.raises(TypeError, match=r"function got '\w+' in addition to 'directory'.*only"):
        function(*args, **kwargs)


def test_unknown_names_are_still_an_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        function("a", nonsense=1)


def test_an_error_names_the_class():
    class Loop:
        @accept_aliases(init="model")
        def __init__(self, model):
            self.model = model

    assert Loop(init=3).model == 3
    with pytest.raises(TypeError, match=r"Loop got 'init' in addition to 'model'"):
        Loop(1, init=2)


def test_the_signature_shows_the_current_names():
    assert list(inspect.signature(function).parameters) == ["directory", "rng"]
