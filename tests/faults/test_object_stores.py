"""Runs in an S3 store, against a real server: kills, second writers, damage, a server that is down.

Each start has a cache of its own unless a test says otherwise: it runs "on another machine".
"""

import json
import logging
import os
import signal

import numpy as np
import pytest

from support import processes
from support.events import read_points
from tekoa import store
from tekoa.store.mirror import fetch, mirror, remote_lease
from tekoa.store.mirror.objects import ABSENT, ConflictError, Objects
from tekoa.store.read.json_lines import read_rows

pytest.importorskip("s3fs", reason="the 'cloud' extra is not installed")
pytest.importorskip("moto.server", reason="moto is not installed")

URL = "s3://bucket/run"
TRAIN = [*processes.TRAIN, "--max_ckpt=2", f"--model_dir={URL}"]
KILLS = ["before_upload:1", "mid_upload:9", "before_head:2", "after_head:1", "mid_remote_gc:1"]


@pytest.fixture(scope="module")
def server():
    """A function that starts the server on a fixed port; its contents outlive a stop."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    service = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    service.start()
    service._port = service.get_host_and_port()[1]
    yield service
    service.stop()


@pytest.fixture(autouse=True)
def bucket(server, monkeypatch, tmp_path):
    """An empty bucket, and variables that lead to it."""
    values = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server._port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "here"),
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    import fsspec

    files = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    if not files.exists("bucket"):
        files.mkdir("bucket")
    for path in files.find("bucket"):
        files.rm_file(path)
    yield values
    mirror._views.clear()


@pytest.fixture
def train(tmp_path):
    """Starts the command, with a new cache each time."""
    commands = []

    def start(*words, cache=None, **env):
        home = tmp_path / (cache or f"machine-{len(commands)}")
        variables = {**processes.compile_cache(tmp_path / "programs"), **env}
        log = tmp_path / f"log-{len(commands)}.txt"
        words = [str(word) for word in words or TRAIN]
        commands.append(processes.Command(words, log, XDG_CACHE_HOME=str(home), **variables))
        return commands[-1]

    yield start
    for command in commands:
        command.close()


def finish(command, code=0):
    assert command.wait()[0] == code, command.output()
    return command.output()


def params_of(path):
    return store.load(path, items=["model_params", "optimizer_state"])


def assert_same(a, b):
    for name in a:
        if isinstance(a[name], dict) and name != "meta":
            assert_same(a[name], b[name])
        elif name != "meta":
            np.testing.assert_array_equal(a[name], b[name])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run on disk that nothing disturbed."""
    path = tmp_path_factory.mktemp("undisturbed")
    words = [*processes.TRAIN, "--max_ckpt=2", f"--model_dir={path / 'run'}"]
    command = processes.Command([str(word) for word in words], path / "log.txt")
    assert command.wait()[0] == 0, command.output()
    return path / "run"


def steps_of_points(path):
    """Returns the steps of every curve, without those of the machine, which differ by start."""
    points = read_points(path / "train").items()
    return {tag: [n for n, _ in curve] for tag, curve in points if not tag.startswith("system/")}


def check_complete(undisturbed):
    """The run in the store has the bits and the points of the undisturbed one, and no more."""
    path = store.fetched(URL, steps="all")
    assert_same(params_of(path), params_of(undisturbed))
    assert sorted(os.listdir(path)) == sorted(
        name for name in os.listdir(undisturbed) if not name.endswith(".lease")
    )
    rows, local_rows = (read_rows(p / "metrics.jsonl") for p in (path, undisturbed))
    assert [row["step"] for row in rows] == [row["step"] for row in local_rows]
    assert [row["train/valid_loss"] for row in rows] == [
        row["train/valid_loss"] for row in local_rows
    ]
    assert steps_of_points(path) == steps_of_points(undisturbed)
    head = fetch.read_head(Objects(URL))[0]
    assert set(Objects(URL).names_in("files")) == head.objects


def test_the_server_has_conditional_writes():
    objects = Objects(URL)
    first = objects.put("a", b"1", replaces=ABSENT)
    for version in (ABSENT, '"other"'):
        with pytest.raises(ConflictError):
            objects.put("a", b"2", replaces=version)
    with pytest.raises(ConflictError):
        objects.put("none", b"2", replaces=first)
    second = objects.put("a", b"2", replaces=first)
    assert objects.read("a") == (b"2", second)
    assert objects.read("none") is None


@pytest.mark.slow
def test_killed_at_every_point_and_resumed_elsewhere(train, undisturbed):
    for point in KILLS:
        command = train(TEKOA_FAULT_AT=f"{point}:SIGKILL")
        finish(command, -signal.SIGKILL)
        # Whatever was published is complete.
        if fetch.read_head(Objects(URL))[0].files:
            assert all(not info.problem for info in store.inspect(URL, verify="full"))
    output = finish(train())
    assert "Resuming from step" in output
    check_complete(undisturbed)


@pytest.mark.slow
def test_a_second_writer_is_refused_and_told_who_writes(train):
    first = train(*TRAIN, "--module_config.step_seconds=0.2")
    first.wait_until(lambda: Objects(URL).read(remote_lease.NAME) is not None)
    output = finish(train(), 73)
    assert f"process {first.popen.pid} on " in output
    assert "is writing here" in output
    first.send(signal.SIGTERM)
    finish(first, 75)


@pytest.mark.slow
def test_a_damaged_object_leads_to_the_checkpoint_before(train):
    finish(train(*TRAIN, "--max_train_steps=10"))
    head = fetch.read_head(Objects(URL))[0]
    path = next(p for p in head.files if p.startswith("checkpoint_10/default/d/"))
    (part,) = head.files[path]
    objects = Objects(URL)
    data = objects.download(part.name)
    objects.upload({part.name: bytes([data[0] ^ 1, *data[1:]])}, lambda: None)
    output = finish(train(*TRAIN, "--max_train_steps=15"))
    assert f"{path} is damaged" in output
    assert "Resuming from step 5." in output
    assert [info.step for info in store.inspect(URL)] == [10, 15]


@pytest.mark.slow
def test_a_server_that_stays_down_is_an_exit_code(train, server):
    words = [*TRAIN, "--max_train_steps=15", "--grace_seconds=2"]
    command = train(*words, "--module_config.step_seconds=0.1", cache="same")
    command.wait_until(lambda: (head := fetch.read_head(Objects(URL))) and head[0].files)
    server.stop()
    try:
        output = finish(command, 74)
    finally:
        server.start()
    assert "not published" in output
    assert "Run the same command again on this machine" in output
    finish(train(*words, cache="same"))
    assert store.load(URL)["step"] == 15


@pytest.mark.slow
def test_refused_credentials_and_missing_buckets_are_errors_at_the_start(train, server, bucket):
    output = finish(train(*TRAIN, "--model_dir=s3://missing/run"), 70)
    assert "s3://missing/run" in output
    assert "bucket does not exist" in output
    assert "Traceback" not in output
    server.stop()
    try:
        output = finish(train(), 70)
    finally:
        server.start()
    assert "Check the name, the network and the credentials." in output
    without = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
    output = finish(train(AWS_EC2_METADATA_DISABLED="true", **without), 70)
    assert "redentials" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_each_checkpoint_is_evaluated_once_while_training_runs(train):
    trainer = train(*TRAIN, "--max_train_steps=20", "--module_config.step_seconds=0.05")
    evaluate = ["eval_wait", processes.TINY_MODEL, f"--model_dir={URL}", "--save_low=cost"]
    evaluator = train(*evaluate)
    evaluator.wait_until(lambda: "at step" in evaluator.output())
    evaluator.send(signal.SIGKILL)
    evaluator.wait()
    finish(trainer)
    finish(train(*evaluate))
    path = store.fetched(URL)
    lines = (path / "eval" / "evaluations.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert steps[-1] == 20
    points = read_points(path / "eval")
    assert all([n for n, _ in values] == steps for values in points.values())
    assert store.load(f"{URL}/eval/low_cost")["step"] in steps


@pytest.mark.slow
def test_a_writer_that_was_replaced_stops_without_publishing(train):
    zombie = train(*TRAIN, "--module_config.step_seconds=0.2")
    zombie.wait_until(lambda: (head := fetch.read_head(Objects(URL))) and head[0].files)
    zombie.send(signal.SIGSTOP)
    Objects(URL).delete([remote_lease.NAME])
    finish(train(*TRAIN, "--max_train_steps=10"))
    head = fetch.read_head(Objects(URL))
    zombie.send(signal.SIGCONT)
    assert "Stop this process" in finish(zombie, 73)
    assert fetch.read_head(Objects(URL)) == head
    assert [(info.step, info.problem) for info in store.inspect(URL)][-1] == (10, "")


@pytest.mark.slow
def test_a_server_that_is_down_for_a_while(train, server, undisturbed):
    command = train(*TRAIN, "--module_config.step_seconds=0.1")
    command.wait_until(lambda: (head := fetch.read_head(Objects(URL))) and head[0].files)
    server.stop()
    command.wait_until(lambda: "publishing failed" in command.output())
    server.start()
    output = finish(command)
    assert output.count("publishing failed") == 1
    assert output.count("publishing works again") == 1
    check_complete(undisturbed)
