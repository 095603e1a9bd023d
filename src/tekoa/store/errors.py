"""Errors of the checkpoint store, each with the exit code of a program that it ends."""

from collections.abc import Sequence


class StoreError(RuntimeError):
    """Any failure of the checkpoint store."""

    exit_code = 70


class DamagedError(StoreError):
    """A step on disk is incomplete, altered or unreadable."""

    exit_code = 65


class UnsafeError(DamagedError):
    """A checkpoint refers to something outside its own directory, or to absurd sizes."""


class NewerVersionError(StoreError):
    """A step has a format version that a later version of Tekoa introduced."""

    exit_code = 78


class NothingUsableError(StoreError):
    """Steps exist, but none is usable; training from scratch would hide that."""

    exit_code = 65


class StepGoneError(StoreError):
    """A step was removed by its writer's retention while it was being read."""


class MismatchError(StoreError, ValueError):
    """A checkpoint does not match the trees it should be restored into.

    Attributes:
        differences: All differences, one line each.
    """

    exit_code = 66

    def __init__(self, message: str, differences: Sequence[str] = ()):
        super().__init__(message)
        self.differences = list(differences)


class LeaseHeldError(StoreError):
    """Another process is writing to the directory."""

    exit_code = 73


class FencedError(StoreError):
    """This process lost its lease because another one took over the directory."""

    exit_code = 73


class UnreachableError(StoreError):
    """An object store did not answer, or refused."""


class SaveFailedError(StoreError):
    """One or more saves did not reach the disk."""

    exit_code = 74
