"""Edits of the text of definitions."""

import ast

from tekoa.estimator.eject import text

SOURCE = '''import math

# Above.
@decorated
def f(
    x: int,
    y: str = "ä",
) -> dict[str, int]:
    """Does.

    More.
    """
    z: int = x  # Kept.
    return {"ä": z, "b": y}


class C:
    """A class."""

    n: int = 3

    def method(self) -> int:
        """Returns n."""
        return self.n
'''


def test_definition_has_its_decorators_and_comments():
    assert text.definition(SOURCE, "f").startswith("# Above.\n@decorated\ndef f(")
    assert text.definition(SOURCE, "g") is None


def test_types_and_docstrings_are_removed_and_comments_stay():
    short = text.short_docstrings(text.without_types(SOURCE))
    ast.parse(short)
    assert '    """Does."""\n    z = x  # Kept.\n' in short
    assert '\ndef f(x, y="ä"):\n' in short
    assert "    def method(self):\n        return self.n" in short
    assert "    n: int = 3" in short


def test_lambdas_of_one_line_are_told_apart():
    line = "pair = (lambda x: x + 1), (lambda x: x * 2)"
    names = {}
    exec(compile(line, "<code>", "exec"), names)
    for function, body in zip(names["pair"], ["x + 1", "x * 2"], strict=True):
        assert ast.unparse(text.lambda_of(line, function.__code__).body) == body


def test_statement_without_its_indentation():
    node = ast.parse(SOURCE).body[1].body[-1]
    assert text.dedented(SOURCE, node) == 'return {"ä": z, "b": y}'


def test_calls_that_change_nothing_are_removed():
    source = "x = keep(x, 'a')\ny = g(\n    keep(keep(x), 'b')\n)\nz = keep(y)"
    plain = "#-\ny = g(\n    x\n)\nz = y"
    assert text.without_calls(source, "keep") == plain


def test_statements_that_fit_are_put_on_one_line():
    long = f"y = f(\n    {'x' * 60},\n    {'y' * 60},\n)"
    for source in (long, "x = (\n    1,\n)\ny = f(\n    1,  # One.\n    2,\n)"):
        assert text.joined(source).endswith(source[-10:])
    assert text.joined("    \nx = [\n    f(\n        1,\n    )\n]").endswith("\nx = [f(1)]")


def test_long_signature_has_its_arguments_on_a_line():
    names = ", ".join(f"argument_{i}" for i in range(8))
    source = f"class A:\n    def f({names}: int) -> None:\n        # Why.\n        return None"
    expected = f"    def f(\n        {names}\n    ):\n        # Why.\n"
    assert expected in text.without_types(source)
