import concurrent.futures
import threading

import pytest

from tekoa.core import hosts_hub, hosts_link


@pytest.fixture
def links():
    """Three processes of one group, as threads."""
    hub = hosts_hub.Hub("127.0.0.1", 0, n_processes=3, timeout_seconds=60)
    lost = []
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        made = pool.map(lambda index: connect(hub.port, index, lost.append), range(3))
        found = list(made)
    found[0].lost = lost
    yield found
    for link in found:
        link.close()
    hub.close()


def connect(port, index, on_lost, n=3, start_timeout_seconds=60):
    return hosts_link.Link(
        [("127.0.0.1", port)],
        index=index,
        n_processes=n,
        timeout_seconds=60,
        start_timeout_seconds=start_timeout_seconds,
        on_lost=on_lost,
    )


def each(links, call):
    with concurrent.futures.ThreadPoolExecutor(len(links)) as pool:
        return list(pool.map(lambda pair: call(*pair), enumerate(links)))


def test_exchanges_of_one_name_are_told_apart(links):
    def twice(index, link):
        first = link.exchange("turn", index, timeout_seconds=60)
        return first, link.exchange("turn", 10 * index, timeout_seconds=60)

    assert each(links, twice) == [([0, 1, 2], [0, 10, 20])] * 3


def test_exchanges_in_two_threads_do_not_meet(links):
    def both(index, link):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            other = pool.submit(link.exchange, "save", f"s{index}", timeout_seconds=60)
            return link.exchange("step", index, timeout_seconds=60), other.result()

    assert each(links, both) == [([0, 1, 2], ["s0", "s1", "s2"])] * 3


def test_all_stop_at_the_same_poll(links):
    """Each polls at its own pace; one is signalled."""
    go_on = threading.Event()

    def poll(index, link):
        for n in range(1, 100_000):
            asked = "SIGTERM" if index == 1 and n > 50 else None
            if link.is_stop_due(asked):
                return n
            if n > 60 * (index + 1):
                go_on.wait(0.001)
        return None

    stops = each(links, poll)
    assert stops[0] is not None
    assert len(set(stops)) == 1
    assert links[2].stopped_by["who"].startswith("process 1")


def test_leaving_together_is_peace(links):
    each(links, lambda index, link: link.leave(0))
    assert links[0].lost == []


def test_a_process_that_goes_without_a_word_ends_the_others(links):
    links[2].close()
    assert links[1]._is_over.wait(30)
    assert "process 2" in links[0].lost[0]


def test_process_0_gone_is_told_by_the_others():
    hub = hosts_hub.Hub("127.0.0.1", 0, n_processes=1, timeout_seconds=60)
    told = threading.Event()
    link = connect(hub.port, 0, lambda reason: told.set(), n=1)
    hub._loop.call_soon_threadsafe(hub._peers[0].writer.close)
    assert told.wait(30)
    link.close()
    hub.close()


def test_nobody_there_is_an_error_in_time():
    with pytest.raises(TimeoutError, match="does not answer"):
        connect(1, 0, print, start_timeout_seconds=0.3)


def test_not_all_there_is_an_error_in_time():
    hub = hosts_hub.Hub("127.0.0.1", 0, n_processes=2, timeout_seconds=60)
    with pytest.raises(TimeoutError, match="not all"):
        connect(hub.port, 0, print, n=2, start_timeout_seconds=0.3)
    hub.close()
