"""The command in a group of processes, tested in one process; tests/hosts runs several."""

import json
import os

import numpy as np
import pytest

from support import coordination
from tekoa import data, hosts
from tekoa.estimator.cli import flags, processes
from tekoa.estimator.run.passes import MarkFirst
from tekoa.hosts.channel import Channel
from tekoa.sharding import layout as layout_lib
from tekoa.sharding import mesh
from tekoa.store.commit import lease


@pytest.mark.parametrize("name", ["num_processes", "process_id"])
def test_process_number_without_an_address_is_a_usage_error(name):
    _, config = flags.parse(["train", f"--{name}=1"])
    with pytest.raises(flags.UsageError, match="--coordinator_address"):
        processes.join(config)


def test_single_process_joins_no_group():
    _, config = flags.parse(["train", "mnist"])
    assert processes.join(config) is config
    assert processes.shard(None, 7, "train_batch_size") == (0, 1)


@pytest.mark.parametrize("label", ["", "eval"])
def test_a_process_that_joins_a_complete_group_is_refused(tmp_path, monkeypatch, label):
    """Its process 0 holds the lease of the run, or of an evaluation; here it is the parent."""
    monkeypatch.setattr(hosts, "join", lambda *_, **__: pytest.fail("has joined"))
    me = lease.identity(os.getppid())
    (tmp_path / label).mkdir(exist_ok=True)
    (tmp_path / label / lease.NAME).write_text(json.dumps({**me, "group": "node0:9000"}))
    group = ["--coordinator_address=node0:9000", "--num_processes=2", "--process_id=1"]
    _, config = flags.parse(["train", "mnist", f"--model_dir={tmp_path}", *group])
    with pytest.raises(hosts.HostsError, match="already is a process 1 of the group at node0"):
        processes.join(config)


class LeftError(Exception):
    pass


@pytest.fixture
def group(monkeypatch):
    """A group of two processes; the exit of this one raises LeftError with the exit code."""

    def leave(code):
        raise LeftError(code)

    service = coordination.Service()
    group = hosts.Hosts(index=1, count=2, channel=Channel(service))
    monkeypatch.setattr(hosts.group, "_joined", [group])
    monkeypatch.setattr(hosts.group.os, "_exit", leave)
    return service


def test_leave_passes_the_exit_code_to_the_group(group):
    with pytest.raises(LeftError, match="74"):
        processes.leave(74)
    failure = json.loads(group.values["tekoa/failure"])
    assert failure == {"index": 1, "code": 74, "why": ""}


def test_crash_prints_the_traceback_and_leaves_the_group(group, capsys):
    with pytest.raises(LeftError, match="1"):
        processes.leave_after_crash(OSError("disk"))
    assert json.loads(group.values["tekoa/failure"])["why"] == "OSError: disk"
    assert "OSError: disk" in capsys.readouterr().err


def test_crash_of_a_single_process_is_left_to_python(capsys):
    processes.leave_after_crash(OSError("disk"))
    assert not capsys.readouterr().err


@pytest.fixture
def halves(monkeypatch):
    """A layout in which this process reads the second half of each batch."""
    monkeypatch.setattr(layout_lib, "local_rows", lambda _, n: slice(n // 2, n))
    return layout_lib.Layout(mesh=mesh.make_mesh())


@pytest.mark.parametrize(
    ("n", "expected"), [(8, [[2, 3], [6, 7]]), (6, [[2, 3], [4, 5]]), (3, [[0, 1, 2]])]
)
def test_full_batches_are_divided_and_the_remainder_is_not(halves, n, expected):
    source = data.as_source({"x": np.arange(n)})

    def batches(**options):
        return MarkFirst(source.batches(4, epochs=1, **options), np.inf)

    undivided = []
    rows = processes.own_rows(
        halves,
        batches,
        n_examples=n,
        size=4,
        flag="eval_batch_size",
        whole=lambda batch: undivided.append(batch) or batch,
    )
    batches = list(rows)
    assert [batch["x"].tolist() for batch in batches] == expected
    assert [bool(batch["is_first"][0]) for batch in batches] == [True, False][: len(expected)]
    assert len(undivided) == (1 if n % 4 else 0)


def test_indivisible_batch_size_is_a_usage_error():
    layout = layout_lib.Layout(mesh=mesh.make_mesh())
    with pytest.raises(flags.UsageError, match="--train_batch_size: A batch of 7 rows"):
        processes.shard(layout, 7, "train_batch_size")
