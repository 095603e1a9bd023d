"""Packages that only some features need, imported when they are used."""

import importlib
from types import ModuleType


class MissingPackageError(ImportError):
    """A package that is not installed; the message says how to install it."""

    exit_code = 2


def require(module: str, *, extra: str, what: str) -> ModuleType:
    """Imports a module of an optional package.

    Args:
        module: The module.
        extra: The extra of Tekoa that installs it.
        what: What needs it, for the message.

    Raises:
        MissingPackageError: If the package is not installed.

    >>> require('no_such_package', extra='torch', what='Flying')
    Traceback (most recent call last):
    ...
    tekoa._extras.MissingPackageError: Flying needs 'no_such_package', which cannot be imported ...
    """
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{what} needs {library!r}, which cannot be imported ({error}). Install it with: pip "
            f"install 'tekoa[{extra}]'",
            name=library,
        ) from None
