"""Public names that are imported when they are first used.

They are listed in the `__init__.pyi` of a package: type checkers and documentation read it, and
`attach` reads it at run time, so that every public name is written once.
"""

import importlib
from collections.abc import Callable
from typing import Any


def attach(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` for a package whose names are in its stub.

    Args:
        package: `__name__` of the package.
        file: `__file__` of the package. The stub beside it holds absolute `from ... import ... as
            ...` statements, one per public name and line.
    """
    # Neither `ast` nor `re` is imported: together they take as long as all the rest.
    with open(f"{file.removesuffix('.py')}.pyi", encoding="utf-8") as stub:
        lines = [line.split() for line in stub if line.startswith("from ")]
    homes = {name: (module, original) for _, module, _, original, _, name in lines}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = homes[name]
        if module == package:  # A module of this package.
            return importlib.import_module(f"{package}.{original}")
        home = importlib.import_module(module)
        if hasattr(home, original):
            return getattr(home, original)
        return importlib.import_module(f"{module}.{original}")

    return load, lambda: sorted(homes), sorted(homes)
