"""Names and axes of weights in other libraries: tables of rules that work in both directions."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import regex

from tekoa.core import messages, trees
from tekoa.core import rules as rules_lib
from tekoa.exchange import axes as axes_lib

# The collections of a model that is not trained, and the item in which a checkpoint stores them.
PARAMS, VARIABLES = "model_params", "model_state"
Weights = Mapping[str, trees.PyTree]


@dataclasses.dataclass(frozen=True)
class WeightRule:
    r"""How one kind of weight is named and arranged elsewhere.

    Attributes:
        pattern: Regular expression, searched in the weight's name, such as `Dense_0/kernel`.
            Names of variables begin with their collection, such as `batch_stats`.
        name: What replaces the match; `\1` is the first group.
        axes: Order of the axes, such as "i o -> o i". A rule with axes applies only to weights
            that have them.
    """

    pattern: str
    name: str
    axes: str = ""


@dataclasses.dataclass(frozen=True)
class Naming:
    """A table of names: own rules first, then those of a library.

    The first of the own rules that matches replaces the name. If it has axes, the result is
    final; otherwise the rules of the library apply to the new name.

    Attributes:
        label: The name of the table, for messages.
        own: Rules for one model.
        library: Rules for the layers of a library.
        separator: Joins the parts of a name.
    """

    label: str
    own: tuple[WeightRule, ...] = ()
    library: tuple[WeightRule, ...] = ()
    separator: str = "/"

    def find(self, name: str, shape: Sequence[int]) -> tuple[str, str]:
        """Returns the name of a weight, and the order of its axes or an empty string."""
        name, axes = _apply(self.own, name, shape)
        if not axes:
            name, axes = _apply(self.library, name, shape)
        if self.separator != "/":
            name = name.replace("/~/", self.separator).replace("/", self.separator)
        return name, axes


def _apply(rules: Iterable[WeightRule], name: str, shape: Sequence[int]) -> tuple[str, str]:
    for rule in rules:
        pattern = regex.compile(rule.pattern)
        if (not rule.axes or axes_lib.fits(shape, rule.axes)) and rules_lib.matches(pattern, name):
            return pattern.sub(rule.name, name, count=1), rule.axes
    return name, ""


# The layers of PyTorch, from those of Flax, Equinox and Haiku. Linear and Conv have their outputs
# first there; attention has one axis for all heads.
TORCH_RULES = (
    WeightRule(r"\b(query|key|value)/kernel$", r"\1/weight", "d h k -> (h k) d"),
    WeightRule(r"\b(query|key|value)/bias$", r"\1/bias", "h k -> (h k)"),
    WeightRule(r"\bout/kernel$", "out/weight", "h k d -> d (h k)"),
    WeightRule(r"(^|/)(kernel|w)$", r"\1weight", "i o -> o i"),
    WeightRule(r"(^|/)(kernel|w)$", r"\1weight", "l i o -> o i l"),
    WeightRule(r"(^|/)(kernel|w)$", r"\1weight", "h w i o -> o i h w"),
    WeightRule(r"(^|/)(kernel|w)$", r"\1weight", "d h w i o -> o i d h w"),
    WeightRule(r"(^|/)bias$", r"\1bias", "o 1 -> o"),
    WeightRule(r"(^|/)bias$", r"\1bias", "o 1 1 -> o"),
    WeightRule(r"(^|/)bias$", r"\1bias", "o 1 1 1 -> o"),
    WeightRule(r"(^|/)(kernel|w|embeddings?|scale)$", r"\1weight"),
    WeightRule(r"(^|/)(b|offset)$", r"\1bias"),
    WeightRule(r"^(?:batch_stats|state)/(.*/)?(mean|var)$", r"\1running_\2"),
)

NATIVE = Naming("native")
TORCH = Naming("torch", library=TORCH_RULES, separator=".")
_BY_LABEL = {"native": NATIVE, "torch": TORCH}

Rules = Mapping[str, str | tuple[str, str]] | Sequence[WeightRule]


def naming_of(names: str | Rules) -> Naming:
    """Returns a table of names.

    Args:
        names: "torch", "native", or rules to apply before those of "torch": a mapping from pattern
            to name, or to name and axes.

    Raises:
        ValueError: If there is no such table, or a rule is not valid.

    >>> naming_of({'^Dense_0': 'fc1'}).find('Dense_0/kernel', (2, 3))
    ('fc1.weight', 'i o -> o i')
    """
    if isinstance(names, str):
        if names not in _BY_LABEL:
            hint = messages.did_you_mean(names, _BY_LABEL)
            raise ValueError(f"names must be 'torch', 'native' or rules, got {names!r}.{hint}")
        return _BY_LABEL[names]
    if isinstance(names, Mapping):
        parts = {p: (v,) if isinstance(v, str) else v for p, v in names.items()}
        rules = tuple(WeightRule(pattern, *part) for pattern, part in parts.items())
    else:
        rules = tuple(names)
    for rule in rules:
        if rule.axes:
            axes_lib.parse(rule.axes)
        try:
            regex.compile(rule.pattern)
        except regex.error as error:
            raise ValueError(
                f"Rule pattern {rule.pattern!r} is not a regular expression: {error}."
            ) from None
    return dataclasses.replace(TORCH, label="rules", own=rules)


def namings_for(rules: Rules | None) -> list[Naming]:
    """Returns the tables in which a file may name the weights of a model with its own rules."""
    return [*([naming_of(rules)] if rules else []), TORCH, NATIVE]


class NamedLeaf(NamedTuple):
    """A weight of a model under its name in a table.

    Attributes:
        item: The item to which it belongs.
        path: Its own name there.
        leaf: The array or shape.
        name: The name in the table.
        axes: The order of the axes there, or an empty string.
    """

    item: str
    path: trees.Name
    leaf: Any
    name: str
    axes: str


def named_leaves(weights: Weights, naming: Naming) -> list[NamedLeaf]:
    """Returns every leaf with its name in a table.

    Args:
        weights: Trees of arrays or shapes, by item.
        naming: The table.

    Raises:
        ValueError: If two leaves get the same name.
    """
    leaves: list[NamedLeaf] = []
    owners: dict[str, str] = {}
    for item, tree in weights.items():
        for path, leaf in trees.named_leaves(tree).items():
            own_name = "/".join(path)
            name, axes = naming.find(own_name, np.shape(leaf))
            if name in owners:
                raise ValueError(
                    f"{owners[name]!r} and {own_name!r} would both be named {name!r}. Use "
                    "names='native', or rules that keep them apart."
                )
            owners[name] = own_name
            leaves.append(NamedLeaf(item, path, leaf, name, axes))
    return leaves


def to_named(weights: Weights, naming: Naming) -> dict[str, np.ndarray]:
    """Returns the arrays under the names of a table, with their axes in its order."""
    arrays = {}
    streams = set() if naming is NATIVE else random_streams(weights)
    for item, path, leaf, name, axes in named_leaves(weights, naming):
        if (item, *path) not in streams:
            array = trees.to_numpy(leaf)
            arrays[name] = axes_lib.arrange(array, axes) if axes else array
    return arrays


def random_streams(weights: Weights) -> set[trees.Name]:
    """Returns the leaves of NNX's random streams, such as that of dropout: a key and a count.

    >>> key, count = np.zeros(2, np.uint32), np.uint32(3)
    >>> sorted(random_streams({VARIABLES: {'drop': {'rngs': {'key': key, 'count': count}}}}))[0]
    ('model_state', 'drop', 'rngs', 'count')
    """
    leaves = {
        (item, *path): leaf
        for item, tree in weights.items()
        for path, leaf in trees.named_leaves(tree).items()
    }
    keys = {name[:-1] for name, leaf in leaves.items() if name[-1] == "key" and _is_key(leaf)}
    return {name for name in leaves if name[:-1] in keys and name[-1] in ("key", "count")}


def _is_key(leaf: Any) -> bool:
    """Whether a leaf is a random key, or its words as a checkpoint has them."""
    return trees.is_key(leaf) or getattr(leaf, "dtype", None) == np.uint32


def from_named(
    arrays: Mapping[str, Any], target: Weights, naming: Naming, *, prefix: str = ""
) -> dict[str, dict[str, Any]]:
    """Returns arrays as trees for a model: the opposite of `to_named`.

    Floats get the dtypes of the model's, as in PyTorch. Arrays that do not belong to the model keep
    their names, in the item of the parameters, except for PyTorch's counters of batches. An array
    whose shape does not fit keeps its axes.

    Args:
        arrays: Arrays by name.
        target: The model's own arrays or shapes.
        naming: The table.
        prefix: What all names of the file start with.
    """
    rest = dict(arrays)
    trees_by_item: dict[str, dict[trees.Name, Any]] = {item: {} for item in target}
    for item, path, leaf, name, axes in named_leaves(target, naming):
        array = rest.pop(prefix + name, None)
        if array is not None:
            trees_by_item[item][path] = _cast_like(leaf, _undo(array, axes, np.shape(leaf)))
    for name, array in rest.items():
        if not name.endswith("num_batches_tracked"):
            trees_by_item.setdefault(PARAMS, {})[(name,)] = array
    return {item: trees.nest(named) for item, named in trees_by_item.items()}


def _undo(array: Any, axes: str, shape: Sequence[int]) -> np.ndarray:
    try:
        return axes_lib.undo(array, axes, shape) if axes else np.asarray(array)
    except ValueError:
        return np.asarray(array)  # The caller reports the shape.


def _cast_like(leaf: Any, array: np.ndarray) -> np.ndarray:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    are_floats = all(jnp.issubdtype(d, jnp.floating) for d in (dtype, array.dtype))
    return array.astype(dtype, copy=False) if are_floats else array


def recognise(
    stored: Iterable[str], target: Weights, namings: Iterable[Naming]
) -> tuple[Naming, str, int]:
    """Returns the table that names most of a model's weights as a file does.

    Args:
        stored: The names in the file.
        target: The model's own arrays or shapes.
        namings: The tables to try; the first wins a tie.

    Returns:
        The table, the prefix of the names in the file, and the number of weights found.
    """
    stored = set(stored)
    candidates = []
    for naming in namings:
        names = [leaf.name for leaf in named_leaves(target, naming)]
        # The first weight suffices: a prefix is common to all.
        prefixes = {
            other.removesuffix(name)
            for name in names[:1]
            for other in stored
            if other.endswith(f".{name}")
        }
        for prefix in ("", *sorted(prefixes)):
            candidates.append((naming, prefix, sum(prefix + name in stored for name in names)))
    return max(candidates, key=lambda candidate: candidate[2])
