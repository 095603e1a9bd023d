"""Edits of the text of definitions."""

import ast

from tekoa.estimator.eject import text

SOURCE = '''import math

# Above.
@decorated
def f(
    x: int,
    y: str = "ä",  # Why.
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
    assert 'y = "ä",  # Why.\n):' in short
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
