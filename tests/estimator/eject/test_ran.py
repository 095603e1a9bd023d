"""The text of a model file, without the lines that do not run in training."""

from tekoa.estimator.eject.ran import GONE, only_what_ran, recorded_lines

SOURCE = '''def f(x, mask=None, kind="a"):
    """Returns x."""
    # About the mask.
    if mask is not None:
        x = x * mask
    if kind == "a":
        # The usual one.
        y = [
            x + 1
        ]
    elif kind == "b":
        y = [x]
    else:
        y = []
    for _ in range(2):
        if x > 10:
            y = y + y
        y = y + [1]
    if kind == "c":
        return None
    elif x:
        y = y + [2]
    def inner():
        return 3
    if mask is None:
        return y + [inner()]
    y = y + [4]
    return y


def g(x):
    if x:
        return 1
    return 2
'''
RESULT = '''def f(x, mask=None, kind="a"):
    """Returns x."""
    # The usual one.
    y = [
        x + 1
    ]
    for _ in range(2):
        y = y + [1]
    if x:
        y = y + [2]
    def inner():
        return 3
    return y + [inner()]


def g(x):
    if x:
        return 1
    return 2
'''


def shortened(tmp_path, call):
    """Returns the source without what a call does not run."""
    path = str(tmp_path / "model.py")
    names = {}
    exec(compile(SOURCE, path, "exec"), names)
    with recorded_lines(lambda file: file == path) as ran:
        result = eval(call, names)
    text = only_what_ran(SOURCE, ran[path])
    assert len(text.splitlines()) == len(SOURCE.splitlines())
    short = "\n".join(line for line in text.splitlines() if line != GONE) + "\n"
    exec(short, names)
    assert eval(call, names) == result
    return short


def test_branches_that_ran_take_the_place_of_ifs(tmp_path):
    assert shortened(tmp_path, "f(1)") == RESULT


def test_a_later_branch_becomes_the_first(tmp_path):
    short = shortened(tmp_path, "[f(1, kind='b'), f(20, kind='x')]")
    assert '    if kind == "b":\n        y = [x]\n    else:\n        y = []\n' in short
    assert "        if x > 10:\n            y = y + y\n" in short


def test_a_branch_that_runs_sometimes_stays(tmp_path):
    short = shortened(tmp_path, "[f(1), f(1, 2), g(0), g(1)]")
    assert "    if mask is not None:\n        x = x * mask\n" in short
    assert short.endswith("    if x:\n        return 1\n    return 2\n")
