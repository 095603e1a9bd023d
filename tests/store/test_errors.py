"""Errors: exit codes and classes that callers can distinguish."""

from tekoa.hosts import signals
from tekoa.store import errors


def test_exit_codes_are_distinct_where_the_reaction_differs():
    kinds = [
        errors.StoreError,
        errors.NothingUsableError,
        errors.MismatchError,
        errors.LeaseHeldError,
        errors.SaveFailedError,
    ]
    codes = [kind.exit_code for kind in kinds] + [signals.EXIT_STOPPED, 0, 1, 2]
    assert len(set(codes)) == len(codes)


def test_unsafe_is_a_kind_of_damage_and_all_are_store_errors():
    assert issubclass(errors.UnsafeError, errors.DamagedError)
    assert issubclass(errors.DamagedError, errors.StoreError)
    assert errors.MismatchError("x", ["a"]).differences == ["a"]
