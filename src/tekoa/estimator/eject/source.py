"""The code of the objects of a run: functions, settings and models, with all that they use."""

import ast
import builtins
import functools
import inspect
import math
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import linen as nn

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.eject import plain
from tekoa.estimator.eject import text as texts
from tekoa.estimator.eject.ran import GONE, Lines, only_what_ran
from tekoa.estimator.model_file.experiment import DataFacts
from tekoa.sharding import constrain

# Modules of Tekoa whose code is copied.
_COPIED = ("tekoa.models.", "tekoa.core.loss.cross_entropy", plain.__name__)
# Names of Tekoa that may occur in code that is copied, each with its plain form.
_STAND_INS = {"Mean", "DataError", "UsageError", "constrain", "TrainState", "MeanMetrics"}
_CONFIGS = (ml_collections.ConfigDict, ml_collections.FrozenConfigDict)
_FOLDED = (int, float, str)  # The types of fields that are written as numbers.
_UNKNOWN = object()


class Code:
    """Collects the definitions and the imports of an ejected file.

    Args:
        module: The model file; modules in its folder belong to it.
        ran: The lines that run in training, by file; others are left out.

    Attributes:
        imports: Lines that import packages.
        blocks: Definitions by name, each after those that it needs.
    """

    def __init__(self, module: types.ModuleType, ran: Mapping[str, Lines] | None = None):
        self._folder, self._ran = pathlib.Path(module.__file__ or "").parent, {**(ran or {})}
        self._owners: dict[str, Any] = {}
        self.imports: dict[str, None] = {}
        self.blocks: dict[str, str] = {}

    def leave_out_what_did_not_run(self, ran: Mapping[str, Lines]) -> None:
        """Leaves out, of more files, all but the lines that ran, in functions that did."""
        self._ran |= ran

    def expression(self, value: Any) -> str:
        """Returns code for a value, after adding what it needs.

        Raises:
            UsageError: If there is none.
        """
        if (literal := as_literal(value)) is not _UNKNOWN:
            return repr(literal)
        if isinstance(value, (*_CONFIGS, DataFacts)):
            self.add_definition(plain, "Config")
            return _config(value)
        if isinstance(value, nn.Module):
            return self.linen(value)
        if isinstance(value, functools.partial):
            words = [self.expression(value.func), *map(self.expression, value.args)]
            words += [f"{k}={self.expression(v)}" for k, v in value.keywords.items()]
            return f"functools.partial({', '.join(words)})"
        if callable(value) and hasattr(value, "__name__"):
            return self._function(value)
        raise UsageError(
            f"A value of type {type(value).__name__} cannot be written as code, so that this run "
            "cannot be ejected."
        )

    def call(self, function: Any, arguments: str, name: str) -> str:
        """Returns the call of a function; `name` names one that has no name."""
        if isinstance(function, functools.partial):
            words = [*map(self.expression, function.args), arguments]
            words += [f"{k}={self.expression(v)}" for k, v in function.keywords.items()]
            return self.call(function.func, ", ".join(words), name)
        return f"{self._function(function, name)}({arguments})"

    def assignment(
        self, function: Callable[..., Any], keyword: str, values: tuple[Any, ...]
    ) -> str:
        """Returns the statements of a function that compute an argument of its last call.

        Args:
            function: `experiment` of a model file.
            keyword: The name of the argument, which becomes the name of a variable.
            values: The arguments of the function.
        """
        module = sys.modules[function.__module__]
        text = texts.definition(self._text(module), function.__name__) or ""
        tree = ast.parse(text)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        found = [k.value for call in calls for k in call.keywords if k.arg == keyword]
        if not found:
            raise UsageError(f"`experiment` must name {keyword}= in its Experiment to be ejected.")
        expression = ast.unparse(found[-1])
        needed, lines = texts.global_names(expression), []
        for node in reversed(tree.body[0].body):  # type: ignore[attr-defined]
            if texts.bound_names(node) & needed:
                statement = texts.dedented(text, node)
                lines.insert(0, statement)
                needed |= texts.global_names(statement)
        lines += [] if expression == keyword else [f"{keyword} = {expression}"]
        parameters = dict(zip(inspect.signature(function).parameters, values))
        return self.resolved("\n".join(lines), module, parameters)

    def add_definition(self, module: types.ModuleType, name: str) -> None:
        """Adds the definition of a name of a model file, as it is."""
        text = texts.definition(self._text(module), name)
        if text is None:
            value = vars(module).get(name, _UNKNOWN)
            raise UsageError(
                f"{module.__name__}: the definition of {name!r} was not found, so that this run "
                f"cannot be ejected (its value is {value!r:.80})."
            )
        self._add(name, text, (module.__name__, name), module)

    def resolved(
        self, text: str, module: types.ModuleType, values: Mapping[str, Any] | None = None
    ) -> str:
        """Returns code with the names of the ejected file, after adding all that it needs.

        Args:
            text: Code of a module.
            module: The module.
            values: Values of variables that are not those of the module. Settings and facts about
                the data are replaced by numbers.
        """
        text = texts.without_types(text)
        if module.__name__.startswith("tekoa."):
            text = texts.short_docstrings(text)
        if vars(module).get("constrain") is constrain:  # Changes nothing on one device.
            text = texts.without_calls(text, "constrain")
        text = texts.edited(text, self._empty_calls(text, module))
        names, edits = texts.global_names(text), []
        for chain in texts.chains(text):
            root = chain[0].id  # type: ignore[attr-defined]
            if root not in names:
                continue
            if root in (values or {}):
                edits += self._replaced(chain, (values or {})[root])
            elif not hasattr(builtins, root) or root in vars(module):
                edits += self._renamed(chain, module)
        return texts.edited(text, edits)

    def _empty_calls(self, text: str, module: types.ModuleType) -> Iterator[texts.Edit]:
        """Yields edits that leave out calls of functions in which nothing ran, such as checks."""
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
                continue
            called = texts.definition(self._text(module), ast.unparse(node.value.func))
            if called is not None and texts.is_empty(called):
                yield node, GONE

    def _add(self, name: str, text: str, owner: Any, module: Any = None) -> None:
        if self._owners.setdefault(name, owner) != owner:
            raise UsageError(
                f"{name!r} would mean two things in the ejected file: rename a variable or a "
                "function of the model file to eject this run."
            )
        if name not in self.blocks:
            self.blocks[name] = ""
            text = text if module is None else self.resolved(text, module)
            del self.blocks[name]  # After those that it needs.
            self.blocks[name] = text

    def _text(self, module: types.ModuleType) -> str:
        """Returns the source of a module, as far as it runs."""
        text = texts.read(module)
        ran = self._ran.get(module.__file__ or "")
        return text if ran is None else only_what_ran(text, ran)

    def linen(self, module: nn.Module, *, is_root: bool = False) -> str:
        """Returns the call that creates a module of Linen.

        Numbers take the place of fields of the root, of which there is one.
        """
        own, words = self._function(type(module)), []
        for name, field in module.__dataclass_fields__.items():
            value = getattr(module, name)
            if name in ("parent", "name") or not field.init:
                continue
            if is_root and self._fold(type(module), name, value):
                continue
            if value is not field.default and as_literal(value) != field.default:
                words.append(f"{name}={self.expression(value)}")
        return f"{own}({', '.join(words)})"

    def _fold(self, owner: type, name: str, value: Any) -> bool:
        """Writes a value in place of a field of a class, unless other code may need the field."""
        text = self.blocks.get(owner.__name__, "")
        uses = re.findall(rf"(\w*)\.{name}\b", "\n".join(self.blocks.values()))
        is_used = f"self.{name}" in text
        if {*uses} - {"self"} or owner.__bases__ != (nn.Module,):
            return False
        if is_used and type(value) not in _FOLDED:
            return False
        without, n = re.subn(rf"^    {name}: .*[^(\[{{,\n]\n", "", text, flags=re.M)
        if n == 1:
            folded = re.sub(rf"\bself\.{name}\b", repr(value), without)
            self.blocks[owner.__name__] = re.sub(r"\n\n\n+(?= )", "\n\n", folded)
        return n == 1

    def _function(self, value: Any, name: str = "function") -> str:
        """Returns the name of a function or class, after adding its definition."""
        module = sys.modules[value.__module__]
        if not self._is_own(module):
            return self._public(value)
        if isinstance(value, type) or "<locals>" not in value.__qualname__ != "<lambda>":
            self.add_definition(module, value.__name__)
            return value.__name__
        text = self._text(module)
        if value.__name__ == "<lambda>":
            node = texts.lambda_of(text, value.__code__)
            body = ast.get_source_segment(text, node.body)
            text = f"def {name}({ast.unparse(node.args)}):\n    return {body}"
        else:
            name, first = value.__name__, value.__code__.co_firstlineno
            nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
            at = [n for n in nodes if n.name == name and n.lineno >= first]
            text = texts.dedented(text, min(at, key=lambda n: n.lineno))
        values = inspect.getclosurevars(value).nonlocals
        self._add(name, self.resolved(text, module, values), value.__code__)
        return name

    def _is_own(self, module: types.ModuleType) -> bool:
        """Whether the code of a module is copied."""
        if module.__name__.startswith("tekoa."):
            return module.__name__.startswith(_COPIED)
        return pathlib.Path(getattr(module, "__file__", None) or ".").parent == self._folder

    def _public(self, value: Any) -> str:
        """Returns the public name of a function of a package, after adding its import."""
        for name, (package, line) in _PACKAGES.items():
            if getattr(package, value.__name__, None) is value:
                self.imports[line] = None
                return f"{name}.{value.__name__}"
        raise UsageError(
            f"{value.__module__}.{value.__qualname__} cannot be written as code, so that this run "
            "cannot be ejected."
        )

    def _replaced(self, chain: list[ast.expr], value: Any) -> list[texts.Edit]:
        """Returns the edit that replaces `config.a.b` by its value, or adds the variable."""
        if not isinstance(value, (*_CONFIGS, DataFacts)):
            name = chain[0].id  # type: ignore[attr-defined]
            code = self.expression(value)
            if code != name:
                self._add(name, f"{name} = {code}", code)
            return []
        node = chain[0]
        for part in chain[1:]:
            if isinstance(part, ast.Attribute):
                new = getattr(value, part.attr, _UNKNOWN)
            else:
                new = value[part.slice.value]  # type: ignore[attr-defined, index]
            if new is _UNKNOWN or callable(new):
                break
            node, value = part, new
            if as_literal(value) is not _UNKNOWN:
                break
        return [(node, self.expression(value))]

    def _renamed(self, chain: list[ast.expr], module: types.ModuleType) -> list[texts.Edit]:
        """Adds what `a.b.c` names, and returns the edit that gives it its name in the file."""
        root = chain[0].id  # type: ignore[attr-defined]
        imported = texts.imports(self._text(module))
        if root not in imported:
            self.add_definition(module, root)
            return []
        value, owner, name, used = vars(module)[root], module, root, 0
        node = imported[root]
        if isinstance(node, ast.ImportFrom) and not isinstance(value, types.ModuleType):
            name = node.names[0].name
            owner = sys.modules.get(node.module or "", module)
        while isinstance(value, types.ModuleType) and self._is_tekoa_or_own(value):
            used += 1
            if used == len(chain):
                raise UsageError(f"A module as a value cannot be ejected: {value.__name__}.")
            owner, name = value, chain[used].attr  # type: ignore[attr-defined]
            value = getattr(value, name)
        if isinstance(value, types.ModuleType) or not self._is_tekoa_or_own(owner):
            self.imports[ast.unparse(ast.fix_missing_locations(node))] = None
            return []
        origin = sys.modules.get(getattr(value, "__module__", None) or "", owner)
        name = getattr(value, "__name__", name)
        if self._is_own(origin):
            self.add_definition(origin, name)
        elif self._is_own(owner):
            self.add_definition(owner, name)
        else:
            self._stand_in(name, module)
        return [(chain[used], name)]

    def _is_tekoa_or_own(self, module: types.ModuleType) -> bool:
        return module.__name__.partition(".")[0] == "tekoa" or self._is_own(module)

    def _stand_in(self, name: str, module: types.ModuleType) -> None:
        if name not in _STAND_INS:
            file = pathlib.Path(module.__file__ or "").name
            raise UsageError(
                f"{file}: {name!r} of Tekoa has no plain equivalent where it is used, so that this "
                "run cannot be ejected. An optimizer of Tekoa can be if `experiment` of a model "
                "file in the short form returns it."
            )
        self.add_definition(plain, name)


# Where functions that are values may come from.
_PACKAGES = {
    "jnp": (jnp, "import jax.numpy as jnp"),
    "nn": (nn, "from flax import linen as nn"),
    "jax.nn": (jax.nn, "import jax"),
    "optax": (optax, "import optax"),
    "math": (math, "import math"),
    "np": (np, "import numpy as np"),
}


def as_literal(value: Any) -> Any:
    """Returns the value that Python's own text of it evaluates to, or a marker if none does."""
    if isinstance(value, bool | int | str | bytes | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _UNKNOWN
    if type(value) in (tuple, list):
        items = [as_literal(item) for item in value]
        return _UNKNOWN if any(item is _UNKNOWN for item in items) else type(value)(items)
    if type(value) is dict:
        items = {key: as_literal(item) for key, item in value.items()}
        return _UNKNOWN if any(item is _UNKNOWN for item in items.values()) else items
    return _UNKNOWN


def _config(value: Any) -> str:
    """Returns the code of settings, without those that are no plain values."""
    fields = value.items() if isinstance(value, _CONFIGS) else vars(value).items()
    words = []
    for name, item in fields:
        if isinstance(item, _CONFIGS) and item is not value and name != "frozen":
            words.append(f"{name}={_config(item)}")
        elif as_literal(item) is not _UNKNOWN:
            words.append(f"{name}={as_literal(item)!r}")
    return f"Config({', '.join(words)})"
