"""A regex table over leaf names gives one value per leaf; the first match wins.

The same table type serves Amos scales and slot shapes, rate groups, freezing, decay
masks and shardings.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tekoa.core import formula, trees

ParamsFn = Callable[[trees.Name, tuple[int, ...]], Any]


class NoRuleError(ValueError):
    """No pattern of a rule table matches a parameter."""


def params_fn_from_assign_map(
    assign_map: Mapping[str, Any], name_sep: str = "/", eval_str_value: bool = False
) -> ParamsFn:
    """Makes a function of a parameter's name and shape from a regex table.

    Args:
        assign_map: Pattern to value, in order. A pattern must match from the start of
            the joined name; it need not reach its end.
        name_sep: What joins the parts of a name before matching.
        eval_str_value: If true, a string value is a formula of `SHAPE`.

    Returns:
        `fn(name, shape)`, which raises `NoRuleError` where no pattern matches.

    Raises:
        ValueError: If a pattern is not a regular expression.

    >>> eta = params_fn_from_assign_map(
    ...     {'.*/bias': 0.5, '.*/kernel': 'sqrt(1 / SHAPE[0])'}, eval_str_value=True)
    >>> eta(('Dense_0', 'kernel'), (4, 8))
    0.5
    """
    table = [(_compiled(pattern), value) for pattern, value in dict(assign_map).items()]

    def params_fn(name: trees.Name, shape: tuple[int, ...]) -> Any:
        joined = name_sep.join(name)
        for pattern, value in table:
            if pattern.match(joined):
                if eval_str_value and isinstance(value, str):
                    return formula.evaluate(value, shape)
                return value
        raise NoRuleError(
            f"No rule matches parameter {joined!r} of shape {tuple(shape)}. Patterns tried: "
            f"{[pattern.pattern for pattern, _ in table]}. "
            "Add a catch-all '.*' rule if every parameter should match."
        )

    return params_fn


def map_rules(assign_map: Mapping[str, Any], tree: trees.PyTree) -> trees.PyTree:
    """Replaces every leaf by the value of the first pattern found in its name.

    Here a pattern may match anywhere in the name, so that 'kernel$' means every kernel.

    Raises:
        NoRuleError: If a leaf matches no pattern; it lists all such leaves.

    >>> map_rules({'bias$': 'fast', '.*': 'slow'}, {'dense': {'kernel': 0, 'bias': 0}})
    {'dense': {'bias': 'fast', 'kernel': 'slow'}}
    """
    table = [(_compiled(pattern), value) for pattern, value in dict(assign_map).items()]
    unmatched = [
        "/".join(name)
        for name in trees.leaf_names(tree)
        if not any(pattern.search("/".join(name)) for pattern, _ in table)
    ]
    if unmatched:
        raise NoRuleError(
            f"No rule matches {_listed(unmatched)}. Patterns tried: "
            f"{[pattern.pattern for pattern, _ in table]}. "
            "Add a catch-all '.*' rule if every parameter should match."
        )

    def value_of(name: trees.Name, _: Any) -> Any:
        return next(value for pattern, value in table if pattern.search("/".join(name)))

    return trees.map_named(value_of, tree)


def compiled(assign_map: Mapping[str, Any]) -> list[tuple[re.Pattern[str], Any]]:
    """Makes a table ready for `first_match`.

    Raises:
        ValueError: If a pattern is not a regular expression.
    """
    return [(_compiled(pattern), value) for pattern, value in assign_map.items()]


def first_match(table: Iterable[tuple[re.Pattern[str], Any]], name: trees.Name) -> Any:
    """Gives the value of the first pattern found in a name; None if there is none.

    >>> first_match(compiled({'bias$': 1, 'dense': 2}), ('dense', 'kernel'))
    2
    """
    joined = "/".join(name)
    return next((value for pattern, value in table if pattern.search(joined)), None)


def _listed(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(repr(name) for name in names[:limit]) + more


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"Rule pattern {pattern!r} is not a regular expression: {error}."
        ) from None
