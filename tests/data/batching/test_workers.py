import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tekoa import data
from tekoa.data.batching import workers


def double(example):
    return {"x": example["x"] * 2, "worker": os.getpid()}


def fail_at_nine(example):
    if example["x"] == 9:
        raise KeyError("nine")
    return example


def source(n=40):
    return data.as_source({"x": np.arange(n)})


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def doubled():
    """Batches from two workers, and the same batches from this process."""
    options = {"batch_size": 4, "shuffle": True, "epochs": 2, "seed": 3}
    with_workers = source().map(double).batches(**options, workers=2)
    yield with_workers, list(source().map(double).batches(**options))
    with_workers.close()


def test_workers_return_the_same_batches_in_order(doubled):
    with_workers, expected = doubled
    start = with_workers.state()
    batches = list(with_workers)
    assert [b["x"].tolist() for b in batches] == [b["x"].tolist() for b in expected]
    processes = {int(pid) for batch in batches for pid in batch["worker"]}
    assert len(processes) == 2
    assert os.getpid() not in processes
    with_workers.restore(start)


def test_workers_continue_from_any_position(doubled):
    with_workers, expected = doubled
    start = with_workers.state()
    for at in (7, 2, 15):
        with_workers.seek(at)
        assert next(with_workers)["x"].tolist() == expected[at]["x"].tolist()
    with_workers.restore(start)


def send_signals(pids):
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)


def test_workers_ignore_the_signals_of_the_run():
    batches = source().map(double).batches(4, workers=2)
    pids = [worker._process.pid for worker in batches._pool._workers]
    send_signals(pids)  # They are still starting.
    for at in range(12):
        assert next(batches)["x"][0] == 8 * at % 80
        send_signals(pids)
    assert [worker._process.pid for worker in batches._pool._workers] == pids
    batches.close()


def test_error_in_a_map_function_is_reported():
    batches = source().map(fail_at_nine).batches(4, workers=1)
    try:
        next(batches), next(batches)
        with pytest.raises(data.DataError, match=r"Batch 2 failed .*KeyError: 'nine'"):
            next(batches)
    finally:
        batches.close()


def with_a_function(example):
    return {"x": lambda: example}


def test_a_batch_that_cannot_be_sent_is_reported():
    batches = source().map(with_a_function).batches(4, workers=1)
    with pytest.raises(data.DataError, match=r"Batch 0 failed in a data worker.*local object"):
        next(batches)
    batches.close()


def test_death_of_a_worker_is_reported():
    batches = source().map(double).batches(4, workers=1)
    next(batches)
    os.kill(batches._pool._workers[0]._process.pid, signal.SIGKILL)
    with pytest.raises(data.DataError, match="exited unexpectedly with code -9"):
        list(batches)
    batches.close()


def test_functions_that_cannot_be_pickled_raise():
    with pytest.raises(data.DataError, match="top level of a module"):
        source().map(lambda example: example).batches(4, workers=1)


def test_streams_cannot_have_workers():
    stream = data.as_source(lambda: ({"x": at} for at in range(9)))
    with pytest.raises(data.DataError, match="workers cannot share it"):
        stream.batches(4, workers=1)


def test_close_stops_the_processes():
    pool = workers.Pool(source().batches(4)._maker, 1)
    pid = pool._workers[0]._process.pid
    assert pool.make(0)[0]["x"].tolist() == [0, 1, 2, 3]
    pool.close()
    assert not is_alive(pid)


SCRIPT = """
import os, signal, sys
import numpy as np
from tekoa import data
if __name__ == "__main__":
    batches = data.as_source({"x": np.arange(40)}).batches(4, workers=1)
    next(batches)
    print(batches._pool._workers[0]._process.pid, flush=True)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("how", "code"), [("kill", -9), ("exit", 0)])
def test_no_worker_outlives_the_run(tmp_path, how, code):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, script, how], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert run.returncode == code
    pid = int(run.stdout)
    wait_until(lambda: not is_alive(pid))
