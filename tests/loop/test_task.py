import numpy as np
import pytest

from tekoa.extensions.files import CheckpointFileReader
from tekoa.loop.task import StateReader, check_count


def test_a_reader_is_known_by_what_it_can_do(tmp_path):
    assert isinstance(CheckpointFileReader(tmp_path, target=None), StateReader)
    assert not isinstance(lambda: None, StateReader)


def test_counts_are_whole_numbers_from_a_least_one_on():
    assert check_count("n", np.int64(3), 1) == 3
    for value, error in ((0, ValueError), (2.0, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match="n must be"):
            check_count("n", value, 1)
