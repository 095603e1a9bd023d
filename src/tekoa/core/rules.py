"""Tables of regular expressions over leaf names; the first match determines a leaf's value.

Used for Amos scales and slot shapes, rate groups, freezing, decay masks and shardings.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import regex

from tekoa.core import formula, messages, trees

ParamsFn = Callable[[trees.Name, tuple[int, ...]], Any]
Table = list[tuple[regex.Pattern[str], Any]]

# Patterns such as '(a+)+$' can take longer than a person lives; all others microseconds.
_MATCH_SECONDS = 1.0


class NoRuleError(ValueError):
    """No pattern of a rule table matches a parameter."""


def params_fn_from_assign_map(
    assign_map: Mapping[str, Any], name_sep: str = "/", eval_str_value: bool = False
) -> ParamsFn:
    """Creates a function of a parameter's name and shape from a regex table.

    Args:
        assign_map: Pattern to value, in order. A pattern must match at the start of the
            joined name, but need not reach its end.
        name_sep: Joins the parts of a name before matching.
        eval_str_value: If true, a string value is a formula of `SHAPE`.

    Returns:
        `fn(name, shape)`, which raises `NoRuleError` if no pattern matches.

    Raises:
        ValueError: If a pattern is not a regular expression.

    >>> eta = params_fn_from_assign_map(
    ...     {'.*/bias': 0.5, '.*/kernel': 'sqrt(1 / SHAPE[0])'}, eval_str_value=True)
    >>> eta(('Dense_0', 'kernel'), (4, 8))
    0.5
    """
    table = compile_rules(assign_map)

    def params_fn(name: trees.Name, shape: tuple[int, ...]) -> Any:
        joined = name_sep.join(name)
        for pattern, value in table:
            if matches(pattern, joined, at_start=True):
                is_formula = eval_str_value and isinstance(value, str)
                return formula.evaluate(value, shape) if is_formula else value
        raise _no_rule(f"parameter {joined!r} of shape {tuple(shape)}", table)

    return params_fn


def map_rules(assign_map: Mapping[str, Any], tree: trees.PyTree) -> trees.PyTree:
    """Replaces every leaf by the value of the first pattern found in its name.

    Here a pattern may match anywhere in the name, so 'kernel$' means every kernel.

    Raises:
        NoRuleError: If leaves match no pattern, with their names.

    >>> map_rules({'bias$': 'fast', '.*': 'slow'}, {'dense': {'kernel': 0, 'bias': 0}})
    {'dense': {'bias': 'fast', 'kernel': 'slow'}}
    """
    table = compile_rules(assign_map)
    names = ["/".join(name) for name in trees.leaf_names(tree)]
    unmatched = [repr(x) for x in names if not any(matches(p, x) for p, _ in table)]
    if unmatched:
        raise _no_rule(messages.some_of(unmatched, limit=8), table)
    return trees.map_named(lambda name, _: first_match(table, name), tree)


def compile_rules(assign_map: Mapping[str, Any]) -> Table:
    """Compiles the patterns of a table, for `first_match`.

    Raises:
        ValueError: If a pattern is not a regular expression.
    """
    table: Table = []
    for pattern, value in dict(assign_map).items():
        try:
            table.append((regex.compile(pattern), value))
        except regex.error as error:
            raise ValueError(
                f"Rule pattern {pattern!r} is not a regular expression: {error}."
            ) from None
    return table


def first_match(table: Iterable[tuple[regex.Pattern[str], Any]], name: trees.Name) -> Any:
    """Returns the value of the first pattern found in a name, or None if there is none.

    >>> first_match(compile_rules({'bias$': 1, 'dense': 2}), ('dense', 'kernel'))
    2
    """
    joined = "/".join(name)
    return next((value for pattern, value in table if matches(pattern, joined)), None)


def unused(assign_map: Mapping[str, Any], names: Iterable[trees.Name]) -> list[str]:
    """Lists the patterns that are found in none of the names.

    >>> unused({'bias$': 1, 'kernal': 2}, [('dense', 'bias')])
    ['kernal']
    """
    joined = ["/".join(name) for name in names]
    table = compile_rules(assign_map)
    return [p.pattern for p, _ in table if not any(matches(p, name) for name in joined)]


def matches(pattern: regex.Pattern[str], name: str, *, at_start: bool = False) -> bool:
    """Returns whether a pattern matches in a name, or at its start, within a time limit.

    Raises:
        ValueError: If that takes too long, as for '(a+)+$' and a long name.
    """
    match = pattern.match if at_start else pattern.search
    try:
        return match(name, timeout=_MATCH_SECONDS) is not None
    except TimeoutError:
        raise ValueError(
            f"Rule pattern {pattern.pattern!r} takes more than {_MATCH_SECONDS:g} s to "
            f"match {name[:80]!r}. Simplify it: avoid repeated groups that contain repetitions."
        ) from None


def _no_rule(names: str, table: Table) -> NoRuleError:
    return NoRuleError(
        f"No rule matches {names}. Patterns tried: {[pattern.pattern for pattern, _ in table]}. "
        "Add a catch-all '.*' rule if every parameter should match."
    )
