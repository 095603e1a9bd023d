import pytest


@pytest.mark.slow
def test_it_learns_as_written(learns_as_written):
    learns_as_written("--library=linen")
