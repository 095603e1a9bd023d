"""Background jobs: errors come back, waits are bounded."""

import logging
import threading
import timeit

import pytest

from tekoa.store import background, errors


def fail():
    raise OSError(28, "No space left on device")


def test_start_returns_before_the_job_ends():
    runner, gate = background.Runner(), threading.Event()
    runner.start("a job", gate.wait)
    assert not runner.wait(0.01)
    gate.set()
    assert runner.wait(5)


def test_failures_are_logged_and_then_fatal(caplog):
    runner = background.Runner(fatal_after=2)
    runner.start("saving step 7", fail)
    with caplog.at_level(logging.ERROR):
        runner.wait()
    assert "saving step 7 failed (1 in a row, fatal after 2)" in caplog.text
    assert "No space left on device" in caplog.text
    runner.start("saving step 8", fail)
    with pytest.raises(errors.SaveFailedError, match="saving step 8 failed"):
        runner.wait()


def test_a_success_in_between_forgives(caplog):
    runner = background.Runner(fatal_after=2)
    for job in (fail, lambda: None, fail):
        runner.start("job", job)
        runner.wait()
    assert caplog.text.count("1 in a row") == 2


def test_poll_reports_once(caplog):
    runner = background.Runner()
    runner.start("job", fail)
    runner._thread.join()
    runner.poll()
    runner.poll()
    assert caplog.text.count("failed") == 1


def test_lost_lease_is_fatal_at_once():
    def lose():
        raise errors.FencedError("lost")

    runner = background.Runner(fatal_after=5)
    runner.start("job", lose)
    with pytest.raises(errors.FencedError):
        runner.wait()


def test_close_tells_of_a_failed_last_job_and_of_one_that_hangs():
    runner = background.Runner()
    runner.start("saving step 3", fail)
    with pytest.raises(errors.SaveFailedError, match="saving step 3 failed"):
        runner.close()
    runner, gate = background.Runner(), threading.Event()
    runner.start("saving step 4", gate.wait)
    with pytest.raises(errors.SaveFailedError, match=r"did not end within 0\.01 seconds"):
        runner.close(0.01)
    gate.set()


def test_fatal_after_must_be_positive():
    with pytest.raises(ValueError, match="fatal_after"):
        background.Runner(fatal_after=0)


def test_poll_is_cheap():
    runner = background.Runner()
    assert min(timeit.repeat(runner.poll, number=1000, repeat=5)) / 1000 < 2e-6
