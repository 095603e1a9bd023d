"""Background saves: errors are reported, waits are bounded."""

import logging
import threading
import timeit

import pytest

from tekoa.store import errors
from tekoa.store.commit import background


def fail():
    raise OSError(28, "No space left on device")


def test_start_returns_before_the_job_ends():
    saver, gate = background.BackgroundSaver(), threading.Event()
    saver.start("a job", gate.wait)
    assert not saver.wait(0.01)
    gate.set()
    assert saver.wait(5)


def test_failures_are_logged_and_then_fatal(caplog):
    saver = background.BackgroundSaver(fatal_after=2)
    saver.start("saving step 7", fail)
    with caplog.at_level(logging.ERROR):
        saver.wait()
    assert "saving step 7 failed (1 in a row, fatal after 2)" in caplog.text
    assert "No space left on device" in caplog.text
    saver.start("saving step 8", fail)
    with pytest.raises(errors.SaveFailedError, match="saving step 8 failed"):
        saver.wait()


def test_a_success_resets_the_count_of_failures(caplog):
    saver = background.BackgroundSaver(fatal_after=2)
    for job in (fail, lambda: None, fail):
        saver.start("job", job)
        saver.wait()
    assert caplog.text.count("1 in a row") == 2


def test_poll_reports_once(caplog):
    saver = background.BackgroundSaver()
    saver.start("job", fail)
    saver._thread.join()
    saver.poll()
    saver.poll()
    assert caplog.text.count("failed") == 1


def test_lost_lease_is_fatal_immediately():
    def lose():
        raise errors.FencedError("lost")

    saver = background.BackgroundSaver(fatal_after=5)
    saver.start("job", lose)
    with pytest.raises(errors.FencedError):
        saver.wait()


def test_close_reports_a_failed_last_job_and_a_hanging_one():
    saver = background.BackgroundSaver()
    saver.start("saving step 3", fail)
    with pytest.raises(errors.SaveFailedError, match="saving step 3 failed"):
        saver.close()
    saver, gate = background.BackgroundSaver(), threading.Event()
    saver.start("saving step 4", gate.wait)
    with pytest.raises(errors.SaveFailedError, match=r"did not end within 0\.01 seconds"):
        saver.close(0.01)
    gate.set()


def test_fatal_after_must_be_positive():
    with pytest.raises(ValueError, match="fatal_after"):
        background.BackgroundSaver(fatal_after=0)


def test_poll_is_cheap():
    saver = background.BackgroundSaver()
    assert min(timeit.repeat(saver.poll, number=1000, repeat=5)) / 1000 < 2e-6
