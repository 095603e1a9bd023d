"""Runs in S3 and Google Cloud Storage, against servers: kills, second writers, damage, outages.

Each start has a cache of its own unless a test says otherwise: it runs "on another machine".
"""

import json
import os
import re
import signal

import numpy as np
import pytest

from support import object_stores, processes
from support.events import read_points
from tekoa import store
from tekoa.store import errors
from tekoa.store.mirror import fetch, mirror, remote_lease
from tekoa.store.mirror.objects import Objects
from tekoa.store.mirror.versions import ABSENT, ConflictError
from tekoa.store.read.json_lines import read_rows

KILLS = ["before_upload:1", "mid_upload:9", "before_head:2", "after_head:1", "mid_remote_gc:1"]


@pytest.fixture(scope="module", params=object_stores.SERVERS)
def server(request):
    """A server that can be stopped and started."""
    service = object_stores.SERVERS[request.param]()
    yield service
    service.stop()
    import fsspec

    # The next server has another port.
    fsspec.get_filesystem_class(request.param).clear_instance_cache()


@pytest.fixture
def url(server):
    return server.url


@pytest.fixture(autouse=True)
def bucket(server, monkeypatch, tmp_path):
    """An empty bucket, and variables that lead to it."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    import fsspec

    scheme = server.url.partition(":")[0]
    files = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)
    if not files.exists("bucket"):
        files.mkdir("bucket")
    for path in files.find("bucket"):
        files.rm_file(path)
    yield
    mirror._views.clear()


@pytest.fixture
def train(tmp_path, url):
    """Starts the command, with a new cache each time; by default it trains."""
    commands = []

    def start(*words, cache=None, **env):
        home = tmp_path / (cache or f"machine-{len(commands)}")
        variables = {**processes.compile_cache(tmp_path / "programs"), **env}
        log = tmp_path / f"log-{len(commands)}.txt"
        if not words or words[0].startswith("--"):
            words = [*processes.TRAIN, "--max_ckpt=2", f"--model_dir={url}", *words]
        words = [str(word) for word in words]
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


def check_complete(url, undisturbed):
    """The run in the store has the bits and the points of the undisturbed one, and no more."""
    path = store.fetched(url, steps="all")
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
    head = fetch.read_head(Objects(url))[0]
    assert set(Objects(url).names_in("files")) == head.objects


def test_the_server_has_conditional_writes(url):
    objects = Objects(url)
    first = objects.put("a", b"1", replaces=ABSENT)
    for version in (ABSENT, '"other"'):
        with pytest.raises(ConflictError):
            objects.put("a", b"2", replaces=version)
    with pytest.raises(ConflictError):
        objects.put("none", b"2", replaces=first)
    second = objects.put("a", b"2", replaces=first)
    assert objects.read("a") == (b"2", second)
    assert objects.read("none") is None


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_a_deleted_bucket_is_no_other_writer(url):
    objects = Objects(url.replace("bucket", "missing"))
    with pytest.raises(errors.UnreachableError, match="bucket 'missing' does not exist"):
        objects.put("a", b"2", replaces='"1"')


def test_a_server_that_ignores_conditions_is_refused(monkeypatch):
    server = object_stores.Google(has_conditions=False)
    try:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.variables["STORAGE_EMULATOR_HOST"])
        import fsspec

        fsspec.filesystem("gs").mkdir("bucket")
        with pytest.raises(errors.StoreError, match="ignores the conditions"):
            store.mirrored(server.url).__enter__()
    finally:
        server.stop()


@pytest.mark.slow
def test_killed_at_every_point_and_resumed_elsewhere(url, train, undisturbed):
    for point in KILLS:
        command = train(TEKOA_FAULT_AT=f"{point}:SIGKILL")
        finish(command, -signal.SIGKILL)
        # Whatever was published is complete.
        if fetch.read_head(Objects(url))[0].files:
            assert all(not info.problem for info in store.inspect(url, verify="full"))
    output = finish(train())
    assert "Resuming from step" in output
    check_complete(url, undisturbed)


@pytest.mark.slow
def test_a_second_writer_is_refused_and_told_who_writes(url, train):
    first = train("--module_config.step_seconds=0.2")
    first.wait_until(lambda: Objects(url).read(remote_lease.NAME) is not None)
    output = finish(train(), 73)
    assert f"process {first.popen.pid} on " in output
    assert "is writing here" in output
    first.send(signal.SIGTERM)
    finish(first, 75)


@pytest.mark.slow
def test_a_damaged_object_leads_to_the_checkpoint_before(url, train):
    finish(train("--max_train_steps=10"))
    head = fetch.read_head(Objects(url))[0]
    path = next(p for p in head.files if p.startswith("checkpoint_10/default/d/"))
    (part,) = head.files[path]
    objects = Objects(url)
    data = objects.download(part.name)
    objects.upload({part.name: bytes([data[0] ^ 1, *data[1:]])}, lambda: None)
    output = finish(train("--max_train_steps=15"))
    assert f"{path} is damaged" in output
    assert "Resuming from step 5." in output
    assert [info.step for info in store.inspect(url)] == [10, 15]


@pytest.mark.slow
def test_a_server_that_stays_down_is_an_exit_code(url, train, server):
    words = ["--max_train_steps=15", "--grace_seconds=2"]
    command = train(*words, "--module_config.step_seconds=0.1", cache="same")
    command.wait_until(lambda: (head := fetch.read_head(Objects(url))) and head[0].files)
    server.stop()
    try:
        output = finish(command, 74)
    finally:
        server.start()
    assert "not published" in output
    assert "Run the same command again on this machine" in output
    finish(train("--max_train_steps=15", cache="same"))
    assert store.load(url)["step"] == 15


@pytest.mark.slow
def test_missing_buckets_and_servers_are_errors_at_the_start(url, train, server):
    missing = url.replace("bucket", "missing")
    output = finish(train(f"--model_dir={missing}"), 70)
    assert missing in output
    assert re.search("bucket.* does not exist", output)
    assert "Traceback" not in output
    server.stop()
    try:
        output = finish(train(), 70)
    finally:
        server.start()
    assert "Check the name, the network and the credentials." in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_missing_credentials_are_an_error_at_the_start(url, train):
    if not url.startswith("s3:"):
        pytest.skip("the server needs no credentials")
    without = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
    output = finish(train(AWS_EC2_METADATA_DISABLED="true", **without), 70)
    assert "redentials" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_each_checkpoint_is_evaluated_once_while_training_runs(url, train):
    trainer = train("--max_train_steps=20", "--module_config.step_seconds=0.05")
    evaluate = ["eval_wait", processes.TINY_MODEL, f"--model_dir={url}", "--save_low=cost"]
    evaluator = train(*evaluate)
    evaluator.wait_until(lambda: "at step" in evaluator.output())
    evaluator.send(signal.SIGKILL)
    evaluator.wait()
    finish(trainer)
    finish(train(*evaluate))
    path = store.fetched(url)
    lines = (path / "eval" / "evaluations.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert steps[-1] == 20
    points = read_points(path / "eval")
    assert all([n for n, _ in values] == steps for values in points.values())
    assert store.load(f"{url}/eval/low_cost")["step"] in steps


READERS = {
    "eval": ("at step 10", ["eval", processes.TINY_MODEL, "--model_dir=URL"]),
    "predict": ("", ["predict", processes.TINY_MODEL, "--model_dir=URL"]),
    "inspect": ("train/valid_cost", ["inspect", "URL"]),
    "page": ("Wrote", ["page", "URL", "--out=OUT.html"]),
    "export": ("Wrote step 10", ["export", "URL", "--to=safetensors", "--out=OUT.safetensors"]),
    "convert": ("checkpoint_5", ["convert", "URL/checkpoint_5", "OUT", "--to=t5x"]),
    "replay": ("the same bits as URL/checkpoint_10", ["replay", "URL", "--from=5", "--to=10"]),
    "verify": ("All bits agree", ["verify", "URL"]),
    "diff": ("same bits up to step 10", ["diff", "URL", "URL"]),
    "why": ("All steps are finite", ["why", "URL"]),
    "eject": ("Wrote", ["eject", "URL", "--out=OUT.py"]),
    "again": ("are in URL-again", ["train", "--again=URL"]),
}
# These are refused before anything starts.
REFUSED = [
    ["sweep", processes.TINY_MODEL, "--grid=module_config.rate=1,2", "--model_dir=URL"],
    ["eject", "URL", "--out=URL/ejected.py"],
    ["export", "URL", "--to=safetensors", "--out=URL/weights.safetensors"],
    ["replay", "URL", "--out=URL/replayed"],
]


@pytest.mark.slow
@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_every_command_accepts_a_url_or_refuses_it(url, train, tmp_path):
    def run(words, code):
        words = [str(w).replace("URL", url).replace("OUT", str(tmp_path / "out")) for w in words]
        return finish(train(*words), code)

    finish(train("--max_train_steps=10"))
    for name, (text, words) in READERS.items():
        output = run(words, 1 if name == "why" else 0)
        assert text.replace("URL", url) in output, (name, output)
        assert "Traceback" not in output
    for words in REFUSED:
        assert "only local paths" in run(words, 2)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_processes_train_together_and_another_machine_resumes(url, train):
    words = [*processes.TRAIN, "--max_ckpt=2", f"--model_dir={url}"]
    command = train("launch", "--processes=2", *words, "--max_train_steps=20")
    assert f"are in {url}" in finish(command)
    assert "Resuming from step 20." in finish(train("--max_train_steps=30"))
    path = store.fetched(url)
    assert [row["step"] for row in read_rows(path / "metrics.jsonl")] == list(range(0, 31, 5))
    assert [info.step for info in store.inspect(url)] == [25, 30]


@pytest.mark.slow
def test_a_writer_that_was_replaced_stops_without_publishing(url, train):
    zombie = train("--module_config.step_seconds=0.2")
    zombie.wait_until(lambda: (head := fetch.read_head(Objects(url))) and head[0].files)
    zombie.send(signal.SIGSTOP)
    Objects(url).delete([remote_lease.NAME])
    finish(train("--max_train_steps=10"))
    head = fetch.read_head(Objects(url))
    zombie.send(signal.SIGCONT)
    assert "Stop this process" in finish(zombie, 73)
    assert fetch.read_head(Objects(url)) == head
    assert [(info.step, info.problem) for info in store.inspect(url)][-1] == (10, "")


@pytest.mark.slow
def test_a_server_that_fails_for_a_while(url, train, server, undisturbed):
    command = train("--module_config.step_seconds=0.1")
    command.wait_until(lambda: (head := fetch.read_head(Objects(url))) and head[0].files)
    server.fail()
    command.wait_until(lambda: "publishing failed" in command.output())
    server.recover()
    output = finish(command)
    assert output.count("publishing failed") == 1
    assert output.count("publishing works again") == 1
    check_complete(url, undisturbed)
