import threading

import pytest

from tekoa.store.mirror.objects import Objects
from tekoa.store.mirror.versions import ABSENT, ConflictError


def test_a_put_replaces_only_the_version_that_it_names(url):
    objects = Objects(url)
    assert objects.read("a") is None
    first = objects.put("a", b"1", replaces=ABSENT)
    with pytest.raises(ConflictError):
        objects.put("a", b"2", replaces=ABSENT)
    second = objects.put("a", b"2", replaces=first)
    with pytest.raises(ConflictError):
        objects.put("a", b"3", replaces=first)
    assert objects.read("a") == (b"2", second)


def test_of_many_writers_one_creates_an_object(url):
    objects, created = Objects(url), []

    def create(name: str) -> None:
        try:
            objects.put("a", name.encode(), replaces=ABSENT)
            created.append(name)
        except ConflictError:
            pass

    threads = [threading.Thread(target=create, args=(str(n),)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [name.encode() for name in created] == [objects.read("a")[0]]
