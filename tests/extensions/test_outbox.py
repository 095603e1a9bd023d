import gc
import logging
import threading
import weakref

import pytest

from tekoa.extensions import outbox
from tekoa.extensions.outbox import Outbox, barrier

TIMEOUT = 20.0


class Recorder:
    """A sink that remembers what it was told; it can be blocked, and it can fail."""

    def __init__(self):
        self.records, self.n_synced, self.threads = [], 0, set()
        self.error, self.is_closed = None, False
        self.may_write = threading.Event()
        self.may_write.set()

    def write(self, records):
        self.threads.add(threading.current_thread())
        assert self.may_write.wait(TIMEOUT)
        if self.error is not None:
            raise self.error
        self.records.extend(records)

    def sync(self):
        self.n_synced = len(self.records)

    def close(self):
        self.is_closed = True


@pytest.fixture
def sink(monkeypatch):
    monkeypatch.setattr(outbox, "RETRY_SECONDS", 0.01)
    return Recorder()


def test_records_are_written_in_order_by_another_thread(sink):
    box = Outbox(sink, name="sink")
    for i in range(100):
        box.put([2 * i, 2 * i + 1])
    assert box.flush()
    assert sink.records == list(range(200))
    assert sink.n_synced == 200
    assert threading.current_thread() not in sink.threads
    box.close()
    assert sink.is_closed


def test_put_does_not_wait_for_a_sink_that_is_stuck(sink, caplog):
    sink.may_write.clear()
    box = Outbox(sink, name="sink")
    box.put([1])
    wait = barrier(timeout_seconds=0.05)
    box.put([2])
    assert not box.flush(timeout_seconds=0.05)
    wait()  # Gives up at once: the sink is known to be late.
    assert caplog.text.count("did not finish writing within 0.05 seconds") == 1
    sink.may_write.set()
    box.close()
    assert sink.records == [1, 2]


def test_a_barrier_covers_what_was_put_before_it(sink):
    box = Outbox(sink, name="sink")
    sink.may_write.clear()
    box.put(["before"])
    wait = barrier()
    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    sink.may_write.set()
    waiting.join(TIMEOUT)
    assert sink.records[: sink.n_synced] == ["before"]
    box.close()


def test_a_failing_sink_is_reported_once_and_tried_again(sink, caplog):
    sink.error = OSError("No space left on device")
    box = Outbox(sink, name="the sink")
    for i in range(5):
        box.put([i])
        assert not box.flush()
    assert caplog.text.count("the sink: OSError: No space left") == 1
    sink.error = None
    box.put([5])
    box.close()
    assert sink.records == [0, 1, 2, 3, 4, 5]
    assert caplog.text.count("works again") == 1


def test_records_beyond_the_limit_are_lost_and_counted(sink, caplog):
    sink.error = OSError("broken")
    box = Outbox(sink, name="sink", max_pending=3)
    for i in range(5):
        assert ("New ones are lost" in caplog.text) == (i > 3)
        box.put([i])
    assert caplog.text.count("New ones are lost") == 1
    assert not box.flush()
    sink.error = None
    box.close()
    assert sink.records == [0, 1, 2]
    assert "2 records could not be written" in caplog.text


def test_a_second_loss_is_reported_again(sink, caplog):
    box = Outbox(sink, name="sink", max_pending=1)
    for _ in range(2):
        sink.error = OSError("broken")
        box.put([0, 1])
        assert not box.flush()
        sink.error = None
        while not box.flush():
            pass
    box.close()
    assert caplog.text.count("New ones are lost") == 2


def test_closing_a_broken_sink_ends_and_says_what_is_missing(sink, caplog):
    sink.error = OSError("broken")
    box = Outbox(sink, name="sink")
    box.put([1, 2])
    box.close()
    box.close()
    assert "2 records could not be written" in caplog.text
    with pytest.raises(ValueError, match="sink is closed"):
        box.put([3])


def test_closing_does_not_wait_for_a_sink_that_does_not_close(sink, caplog, tmp_path):
    may_close = threading.Event()
    sink.close = lambda: may_close.wait(TIMEOUT)
    box = Outbox(sink, name="service", held_for=tmp_path)
    box.put([1])
    box.close(grace_seconds=0.05)
    assert sink.records == [1]
    assert "service: not everything was sent. The next start" in caplog.text
    may_close.set()


def test_a_sink_that_cannot_be_closed_is_one_warning(sink, caplog):
    def close():
        raise OSError("broken")

    sink.close = close
    box = Outbox(sink, name="sink")
    box.put([1])
    box.close()
    assert [record.message for record in caplog.records] == ["sink: OSError: broken"]


def test_records_that_follow_soon_are_written_by_the_same_thread(sink, monkeypatch):
    monkeypatch.setattr(outbox, "IDLE_SECONDS", TIMEOUT)
    box = Outbox(sink, name="sink")
    for i in range(3):
        box.put([i])
        assert box.flush()
    assert len(sink.threads) == 1
    box.close()
    assert not any(thread.is_alive() for thread in sink.threads)


def test_an_idle_outbox_keeps_no_thread_and_can_be_collected(sink, caplog, monkeypatch):
    monkeypatch.setattr(outbox, "IDLE_SECONDS", 0.01)
    caplog.set_level(logging.WARNING)
    box = Outbox(sink, name="sink")
    box.put([1])
    assert box.flush()
    reference = weakref.ref(box)
    for thread in sink.threads:
        thread.join(TIMEOUT)
    del box
    gc.collect()
    assert reference() is None
    assert not caplog.text


def test_held_records_wait_for_a_commit_and_saves_do_not_wait_for_them(sink, tmp_path):
    box = Outbox(sink, name="sink", held_for=tmp_path)
    box.put([1, 2])
    let_go = outbox.release(tmp_path)
    outbox.release(tmp_path / "another")()
    box.put([3])
    barrier(timeout_seconds=TIMEOUT)()
    assert sink.records == []
    let_go()
    assert box._wait_for(2, TIMEOUT)
    assert sink.records == [1, 2]
    box.close()
    assert sink.records == [1, 2, 3]


def test_an_attempt_that_fails_while_it_is_closed_is_not_the_last(sink):
    box, write, has_failed = Outbox(sink, name="sink"), sink.write, threading.Event()
    closing = threading.Thread(target=box.close)

    def fail_while_closing(records):
        sink.write = write
        closing.start()
        while not is_closed(box):
            pass
        has_failed.set()
        raise OSError("full")

    sink.write = fail_while_closing
    box.put([1])
    assert has_failed.wait(TIMEOUT)
    closing.join(TIMEOUT)
    assert sink.records == [1]


def is_closed(box):
    try:
        box.put([])
    except ValueError:
        return True
    return False
