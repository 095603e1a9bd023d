"""Background saves: errors are reported, waits are bounded."""

import functools
import logging
import os
import signal
import threading
import time

import pytest

from tekoa.hosts import signals
from tekoa.store import errors
from tekoa.store.commit import background


def fail():
    raise OSError(28, "No space left on device")


def test_start_returns_before_the_job_ends():
    saver, gate = background.BackgroundSaver(), threading.Event()
    saver.start("a job", gate.wait)
    assert not saver.wait(0.01)
    gate.set()
    assert saver.wait()


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
    assert "job failed (1 in a row" in caplog.text  # As soon as it fails, without a call.
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
    with pytest.raises(errors.SaveFailedError, match="did not end within 1000 seconds"):
        saver.close(1000)  # It waits once.
    gate.set()


def test_job_that_waits_for_the_one_before_is_counted_and_reported(caplog, monkeypatch):
    monkeypatch.setattr(background, "_LATE_SECONDS", 0.0)
    saver, gate = background.BackgroundSaver(), threading.Event()
    saver.start("saving step 1", gate.wait)
    threading.Timer(0.3, gate.set).start()
    saver.start("saving step 2", lambda: None)
    saver.wait()
    assert saver.n_late == 1
    assert "saving step 2 waits for the previous save" in caplog.text


def test_after_a_stop_the_wait_for_a_stuck_job_ends_with_the_grace_period():
    saver, gate = background.BackgroundSaver(grace_seconds=0.2), threading.Event()
    saver.start("saving step 1", gate.wait)
    with signals.stop_flag():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(errors.SaveFailedError, match=r"step 1 did not end within 0\.2 seconds"):
            saver.start("saving step 2", lambda: None)
    gate.set()


def test_only_the_last_postponed_job_runs_when_the_program_waits():
    saver, gate, done = background.BackgroundSaver(), threading.Event(), []
    saver.start("1", gate.wait)
    for n in (2, 3):
        saver.postpone(str(n), functools.partial(done.append, n))
    gate.set()
    saver.close()
    assert (done, saver.n_late) == ([3], 2)


def test_postponed_job_is_dropped_when_a_newer_one_starts():
    saver, gate, done = background.BackgroundSaver(), threading.Event(), []
    saver.start("1", gate.wait)
    saver.postpone("2", lambda: done.append(2))
    gate.set()
    saver.start("3", lambda: done.append(3))
    saver.close()
    assert done == [3]


def test_jobs_of_two_threads_run_one_after_another():
    saver, n_running, overlaps = background.BackgroundSaver(), [], []

    def job():
        n_running.append(1)
        overlaps.append(len(n_running))
        time.sleep(0.002)
        n_running.pop()

    def start_many():
        for _ in range(20):
            saver.start("job", job)

    threads = [threading.Thread(target=start_many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    saver.close()
    assert overlaps == [1] * 60


def test_fatal_after_must_be_positive():
    with pytest.raises(ValueError, match="fatal_after"):
        background.BackgroundSaver(fatal_after=0)
