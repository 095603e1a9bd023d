"""Packages that only some features need, imported when they are used."""

import importlib
import importlib.util
import sys
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


def import_inside(module: str) -> ModuleType:
    """Imports a module of a package without running the package's own `__init__`.

    That of tensorboardX imports torch, if it is installed, which takes seconds.

    >>> import_inside('tensorboardX.proto.event_pb2').__name__
    'tensorboardX.proto.event_pb2'
    """
    if module in sys.modules:
        return sys.modules[module]
    package = module.partition(".")[0]
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None:
        return importlib.import_module(module)
    empty = sys.modules[package] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module(module)
    finally:
        if sys.modules.get(package) is empty:
            del sys.modules[package]
