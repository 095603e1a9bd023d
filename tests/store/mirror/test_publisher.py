import contextlib
import json
import shutil
import threading

import numpy as np
import pytest

from tekoa import store
from tekoa.store import errors
from tekoa.store.commit import paths
from tekoa.store.mirror import fetch, publisher, registry, remote_lease
from tekoa.store.mirror.objects import Objects
from tekoa.store.mirror.publisher import Publisher


@pytest.fixture
def opened(url, monkeypatch):
    """A function that opens publishers, which are closed at the end."""
    monkeypatch.setattr(publisher, "RETRY_SECONDS", 0.01)
    publishers = []

    def open_one():
        publishers.append(Publisher(url))
        return publishers[-1]

    yield open_one
    for each in publishers:
        with contextlib.suppress(errors.StoreError):
            each.close(0.5)


def save(directory, *steps, keep=2):
    with store.Store(directory, keep=[store.KeepLast(keep)]) as writer:
        for step in steps:
            writer.save(step, {"w": np.full(3, float(step))})
            writer.wait()


def stored(url):
    return fetch.read_head(Objects(url))[0]


def steps_of(head):
    return sorted({path.split("/")[0] for path in head.files if path.startswith("checkpoint_")})


def test_what_is_committed_is_published(opened, url):
    one = opened()
    save(one.directory, 1, 2, 3)
    assert one.wait(60)
    assert steps_of(stored(url)) == ["checkpoint_2", "checkpoint_3"]
    # Objects of the step that retention removed are gone.
    assert set(Objects(url).names_in("files")) == stored(url).objects


def test_another_machine_continues(opened, url, cache):
    one = opened()
    save(one.directory, 1, 2)
    (one.directory / "metrics.jsonl").write_text("1\n2\n")
    one.close(60)
    shutil.rmtree(cache)
    other = opened()
    assert store.load(other.directory)["step"] == 2
    assert (other.directory / "metrics.jsonl").read_text() == "1\n2\n"
    save(other.directory, 3)
    other.close(60)
    assert steps_of(stored(url)) == ["checkpoint_2", "checkpoint_3"]
    assert set(Objects(url).names_in("files")) == stored(url).objects


def test_what_was_saved_but_not_published_is_continued_on_the_same_machine(
    opened, url, monkeypatch
):
    one = opened()
    save(one.directory, 1)
    assert one.wait(60)
    monkeypatch.setattr(Publisher, "_publish", fail)
    save(one.directory, 2)
    with pytest.raises(errors.SaveFailedError, match="step 2 is not published"):
        one.close(0.2)
    monkeypatch.undo()
    one._lease.release()
    monkeypatch.setenv("XDG_CACHE_HOME", str(one.directory.parents[3]))
    again = opened()
    assert store.load(again.directory)["step"] == 2
    again.close(60)
    assert "checkpoint_2" in steps_of(stored(url))


def fail(*_, **__):
    raise errors.UnreachableError("the server is down.")


def test_a_history_that_another_machine_continued_wins(opened, url, monkeypatch, tmp_path, caplog):
    one = opened()
    save(one.directory, 1)
    one.close(60)
    save(one.directory, 2)  # Saved here, never published.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    other = opened()
    save(other.directory, 5)
    other.close(60)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    again = opened()
    assert again.directory == one.directory
    assert store.load(again.directory)["step"] == 5
    assert [info.step for info in store.inspect(again.directory, verify="none")] == [1, 5]
    assert "checkpoint_2 of an earlier working copy" in caplog.text


def test_the_last_copy_of_checkpoints_is_kept(opened, url, caplog):
    one = opened()
    save(one.directory, 1, 2)
    one.close(10)
    objects = Objects(url)
    objects.delete(objects.names_in(""))  # As when a bucket is deleted.
    two = opened()
    assert "up to step 2" in caplog.text
    assert paths.list_steps(two.directory) == []
    (kept,) = two.directory.parent.glob("set_aside-*")
    assert store.load(kept)["w"].tolist() == [2, 2, 2]


def test_a_cleaned_cache_does_not_empty_the_store(opened, url):
    one = opened()
    save(one.directory, 1)
    assert one.wait(60)
    shutil.rmtree(one.directory)
    (one.directory / "train").mkdir(parents=True)
    (one.directory / "train" / "x").write_text("x")
    with pytest.raises(errors.SaveFailedError, match="has lost its checkpoints"):
        one.close(0.2)
    assert steps_of(stored(url)) == ["checkpoint_1"]


def test_lost_files_of_a_working_copy_are_downloaded_again(opened, url):
    one = opened()
    save(one.directory, 1, 2)
    one.close(60)
    shutil.rmtree(one.directory)
    again = opened()
    assert store.load(again.directory)["step"] == 2


def test_a_replaced_writer_publishes_and_deletes_nothing(opened, url, monkeypatch, cache, tmp_path):
    monkeypatch.setattr(remote_lease, "RENEW_SECONDS", 3600)
    zombie = opened()
    save(zombie.directory, 1)
    assert zombie.wait(60)
    # Somebody breaks the lease, and another machine continues.
    Objects(url).delete([remote_lease.NAME])
    registry.discard(zombie.directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    other = opened()
    save(other.directory, 2)
    assert other.wait(60)
    before = stored(url)
    registry.add(zombie.directory, zombie)
    save(zombie.directory, 3)
    assert not zombie.wait(60)
    # The next save of the zombie is refused before it is committed.
    with pytest.raises(errors.FencedError):
        save(zombie.directory, 4)
    assert not (zombie.directory / "checkpoint_4").exists()
    with pytest.raises(errors.FencedError, match="another writer took over"):
        zombie.close(60)
    assert stored(url) == before
    assert before.objects <= set(Objects(url).names_in("files"))
    other.close(60)
    # The next writer deletes what the zombie uploaded.
    assert set(Objects(url).names_in("files")) >= stored(url).objects
    last = opened()
    last.close(60)
    assert set(Objects(url).names_in("files")) == stored(url).objects


def test_a_replaced_writer_does_not_sweep_the_objects_of_its_successor(
    opened, url, monkeypatch, tmp_path
):
    monkeypatch.setattr(remote_lease, "RENEW_SECONDS", 3600)
    zombie = opened()
    Objects(url).delete([remote_lease.NAME])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    other = opened()
    save(other.directory, 2)
    assert other.wait(60)
    zombie._sweep()  # Its first one, which also deletes what killed writers left.
    assert stored(url).objects <= set(Objects(url).names_in("files"))


def test_a_put_whose_answer_never_came_is_found_later(opened, url, monkeypatch):
    one = opened()
    put, answers = Objects.put, []

    def put_without_answer(self, name, data, *, replaces):
        version = put(self, name, data, replaces=replaces)
        if name == "tekoa.head" and not answers:
            answers.append(version)
            raise errors.UnreachableError("the connection was lost.")
        return version

    monkeypatch.setattr(Objects, "put", put_without_answer)
    save(one.directory, 1)
    assert one.wait(60)
    assert answers
    assert set(Objects(url).names_in("files")) == stored(url).objects
    save(one.directory, 2)
    one.close(60)
    assert steps_of(stored(url)) == ["checkpoint_1", "checkpoint_2"]


def test_a_working_copy_is_continued_after_a_put_without_answer_and_an_outage(
    opened, url, monkeypatch
):
    one = opened()
    put = Objects.put

    def put_once(self, name, data, *, replaces):
        if name == "tekoa.head" and not steps_of(stored(url)):
            put(self, name, data, replaces=replaces)
        raise errors.UnreachableError("the connection was lost.")

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "put", put_once)
        save(one.directory, 1)
        while not steps_of(stored(url)):
            one.wait(0.01)
        save(one.directory, 2)
        with pytest.raises(errors.SaveFailedError, match="step"):
            one.close(0.5)
        one._has_ended = True  # Killed.
    Objects(url).delete([remote_lease.NAME])
    two = opened()
    assert two.directory == one.directory
    save(two.directory, 3, keep=3)
    assert two.wait(60)
    assert steps_of(stored(url)) == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]


def test_a_second_writer_is_refused(opened):
    opened()
    with pytest.raises(errors.LeaseHeldError, match="already writing"):
        opened()


def test_a_server_that_is_down_for_a_while_is_reported_once(opened, url, monkeypatch, caplog):
    one = opened()
    n_failures = []
    is_down = threading.Event()
    is_down.set()
    upload = Objects.upload

    def flaky(self, *arguments):
        if is_down.is_set():
            n_failures.append(1)
            raise errors.UnreachableError("the server is down.")
        upload(self, *arguments)

    monkeypatch.setattr(Objects, "upload", flaky)
    save(one.directory, 1)
    while len(n_failures) < 3:
        one.wait(0.01)
    is_down.clear()
    assert one.wait(60)
    assert steps_of(stored(url)) == ["checkpoint_1"]
    assert caplog.text.count("publishing failed") == 1
    assert caplog.text.count("publishing works again") == 1


def test_a_lost_answer_to_the_put_of_the_head_is_no_loss(opened, url, monkeypatch):
    one = opened()
    put = Objects.put

    def put_twice(self, name, data, *, replaces):
        put(self, name, data, replaces=replaces)
        return put(self, name, data, replaces=replaces)  # A retry inside the client.

    monkeypatch.setattr(Objects, "put", put_twice)
    save(one.directory, 1)
    assert one.wait(60)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(one.directory.parents[3]))
    save(one.directory, 2)
    one.close(60)
    assert steps_of(stored(url)) == ["checkpoint_1", "checkpoint_2"]


def test_an_upload_that_no_head_names_is_not_repeated_but_swept(opened, url, monkeypatch):
    one = opened()
    put_head = Publisher._put
    monkeypatch.setattr(Publisher, "_put", fail)
    save(one.directory, 1)
    while not one._problem:
        one.wait(0.01)
    before = set(Objects(url).names_in("files"))
    assert before
    monkeypatch.setattr(Publisher, "_put", put_head)
    assert one.wait(60)
    assert stored(url).objects == before == set(Objects(url).names_in("files"))


def test_a_quarantined_step_stays_in_the_store(opened, url):
    one = opened()
    save(one.directory, 1, 2)
    path = one.directory / "checkpoint_2" / "tekoa.json"
    path.write_bytes(path.read_bytes()[:-9] + b"[damaged]")
    with store.Store(one.directory) as writer:
        assert writer.restore({"w": np.zeros(3)}).step == 1
    one.close(60)
    names = steps_of(stored(url))
    assert names[0] == "checkpoint_1"
    assert names[1].startswith("checkpoint_2.bad-")


def test_the_record_of_a_working_copy_names_its_url(opened, url):
    one = opened()
    assert json.loads((one.directory.parent / "published.json").read_text())["url"] == url
