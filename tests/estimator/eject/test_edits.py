"""Edits of source by its syntax tree."""

import ast

from tekoa.estimator.eject import edits


def test_items_are_removed_with_one_comma():
    source = edits.Source("f(a, bb, c)")
    call = ast.parse("f(a, bb, c)").body[0].value
    for i, expected in enumerate(["f(bb, c)", "f(a, c)", "f(a, bb)"]):
        edit = source.without_item(call.args, i)
        data = source.data[: edit.start] + edit.text.encode() + source.data[edit.end :]
        assert data.decode() == expected


def test_outer_edit_wins_and_comments_stay():
    def rule(tree, source):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield source.replaced(node, source.text(node.args[0]))

    assert edits.apply("x = f(g('é'))  # é\ny = f(2)", rule) == "x = 'é'  # é\ny = 2"
