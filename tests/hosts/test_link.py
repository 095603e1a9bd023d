import concurrent.futures
import threading

import pytest

from tekoa.hosts import hub as hub_lib
from tekoa.hosts import link as link_lib


@pytest.fixture
def links():
    """Three processes of one group, as threads."""
    hub = hub_lib.Hub("127.0.0.1", 0, n_processes=3, timeout_seconds=60)
    lost = []
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        links = list(pool.map(lambda index: connect(hub.port, index, lost.append), range(3)))
    links[0].lost = lost
    yield links
    for link in links:
        link.close()
    hub.close()


def connect(port, index, on_lost, n=3, start_timeout_seconds=60):
    return link_lib.Link(
        [("127.0.0.1", port)],
        index=index,
        n_processes=n,
        timeout_seconds=60,
        start_timeout_seconds=start_timeout_seconds,
        on_lost=on_lost,
    )


def run_on_each(links, call):
    with concurrent.futures.ThreadPoolExecutor(len(links)) as pool:
        return list(pool.map(lambda pair: call(*pair), enumerate(links)))


def test_exchanges_with_the_same_name_are_distinguished(links):
    def twice(index, link):
        first = link.exchange("turn", index, timeout_seconds=60)
        return first, link.exchange("turn", 10 * index, timeout_seconds=60)

    assert run_on_each(links, twice) == [([0, 1, 2], [0, 10, 20])] * 3


def test_exchanges_in_two_threads_are_independent(links):
    def in_two_threads(index, link):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            other = pool.submit(link.exchange, "save", f"s{index}", timeout_seconds=60)
            return link.exchange("step", index, timeout_seconds=60), other.result()

    assert run_on_each(links, in_two_threads) == [([0, 1, 2], ["s0", "s1", "s2"])] * 3


def test_all_stop_at_the_same_poll(links):
    """Each polls at its own pace; one receives a signal."""
    never = threading.Event()

    def poll(index, link):
        for n in range(1, 100_000):
            signal_name = "SIGTERM" if index == 1 and n > 50 else None
            if link.is_stop_due(signal_name):
                return n
            if n > 60 * (index + 1):
                never.wait(0.001)
        return None

    stops = run_on_each(links, poll)
    assert stops[0] is not None
    assert len(set(stops)) == 1
    assert links[2].stopped_by["who"].startswith("process 1")


def test_leaving_together_loses_no_process(links):
    run_on_each(links, lambda index, link: link.leave(0))
    assert links[0].lost == []


def test_a_process_that_disconnects_ends_the_others(links):
    links[2].close()
    assert links[1]._is_over.wait(30)
    assert "process 2" in links[0].lost[0]


def test_the_loss_of_the_hub_is_noticed():
    hub = hub_lib.Hub("127.0.0.1", 0, n_processes=1, timeout_seconds=60)
    is_lost = threading.Event()
    link = connect(hub.port, 0, lambda reason: is_lost.set(), n=1)
    hub._loop.call_soon_threadsafe(hub._peers[0].writer.close)
    assert is_lost.wait(30)
    link.close()
    hub.close()


def test_a_missing_hub_is_an_error_after_the_timeout():
    with pytest.raises(TimeoutError, match="does not answer"):
        connect(1, 0, print, start_timeout_seconds=0.3)


def test_a_missing_process_is_an_error_after_the_timeout():
    hub = hub_lib.Hub("127.0.0.1", 0, n_processes=2, timeout_seconds=60)
    with pytest.raises(TimeoutError, match="not all"):
        connect(hub.port, 0, print, n=2, start_timeout_seconds=0.3)
    hub.close()
