"""Source is shortened to what ran."""

import pytest

from tekoa.estimator.eject import edits, trim
from tekoa.estimator.eject.watch import Watch

TEXT = '''class Model:
    def used(self, x, deep):
        """Runs."""
        if x is None:
            raise ValueError("No x.")
        if deep:  # Always.
            x = x + 1
        if x > 2:
            x = x * 2
        elif x == 2:
            x = x * 3
        else:
            x = x * 4
        return x

    def unused(self):
        return 0
'''


def trimmed(tmp_path, calls):
    path = tmp_path / "model.py"
    path.write_text(TEXT)
    names = {}
    exec(compile(TEXT, str(path), "exec"), names)
    with Watch([str(path)]) as watch:
        results = [names["Model"]().used(*call) for call in calls]
    text = trim.only_what_ran(TEXT, watch.lines[str(path)])
    short = {}
    exec(text, short)
    assert [short["Model"]().used(*call) for call in calls] == results
    return text


def test_branches_that_never_ran_are_removed(tmp_path):
    text = trimmed(tmp_path, [(1, True)])
    assert "if" not in text
    assert "x * 3" in text
    assert "unused" not in text


@pytest.mark.parametrize("calls", [[(1, True), (1, False)], [(5, False), (1, True)]])
def test_conditions_with_several_outcomes_stay(tmp_path, calls):
    text = trimmed(tmp_path, calls)
    assert "if deep" in text
    assert "No x." not in text


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        (
            trim.no_annotations,
            "def f(a: int, *b: str, c: int = 3) -> tuple[int]:\n    d: int = a\n    return d",
            "def f(a, *b, c=3):\n    d = a\n    return d",
        ),
        (
            trim.unused_parameters,
            "def f(a, b, *c):\n    return a + c\n\n\nx = f(1, 2, 3)",
            "def f(a, *c):\n    return a + c\n\n\nx = f(1, 3)",
        ),
        (
            trim.unused_items,
            "def f():\n    a, b = (1, 2), (3, 4)\n    return a",
            "def f():\n    a = (1, 2)\n    return a",
        ),
        (
            trim.direct_returns,
            "def f():\n    a = g(1)\n    return a",
            "def f():\n    return g(1)",
        ),
        (
            trim.without_aliases,
            "def f():\n    a = g(1)\n    b = a\n    return h(b)",
            "def f():\n    b = g(1)\n    return h(b)",
        ),
        (
            trim.without_metrics("loss"),
            "def loss(x):\n    return x.sum(), {'mean': x}",
            "def loss(x):\n    return x.sum()",
        ),
        (
            trim.results_used(["f"]),
            "def f():\n    check(1)\n    a = g()\n    return 2",
            "def f():\n    return 2",
        ),
        (trim.on_one_line, "x = f(\n    1,\n    [2],\n)", "x = f(1, [2])"),
        (
            trim.short_docstrings,
            'def f():\n    """One.\n\n    Two.\n    """\n    return 1',
            'def f():\n    """One."""\n    return 1',
        ),
    ],
)
def test_rules(rule, before, after):
    assert edits.apply(before, rule) == after


@pytest.mark.parametrize(
    ("body", "is_removed"),
    [("return x, {'mean': x}", True), ("return other(x)", False), ("return x, y", False)],
)
def test_metrics_are_removed_only_where_they_are_seen(body, is_removed):
    assert trim.returns_metrics(f"def loss(x):\n    {body}", "loss") == is_removed
