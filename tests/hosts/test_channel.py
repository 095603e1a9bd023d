import jax
import pytest

from support.coordination import Service, run_on_each
from tekoa import hosts
from tekoa.hosts import channel


@pytest.fixture
def service():
    return Service()


def test_values_are_json_by_key(service):
    one, two = channel.Channel(service), channel.Channel(service)
    one.put("a/1", {"x": [1, None]})
    assert two.get("a/1") == {"x": [1, None]}
    assert two.list("a") == {"1": {"x": [1, None]}}
    two.drop("a")
    assert service.values == {}


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_a_missing_value_is_a_timeout(service, seconds):
    with pytest.raises(TimeoutError):
        channel.Channel(service).get("none", timeout_seconds=seconds)


def test_other_errors_of_the_service_are_raised(service):
    def fail(*_):
        raise RuntimeError("UNAVAILABLE: connection refused")

    service.key_value_try_get = service.blocking_key_value_get = service.key_value_set = fail
    line = channel.Channel(service)
    for call in (
        lambda: line.put("a", 1),
        lambda: line.get("a"),
        lambda: line.get("a", timeout_seconds=1),
    ):
        with pytest.raises(RuntimeError, match="UNAVAILABLE"):
            call()


def test_keys_of_a_name_are_numbered():
    line = channel.Channel(None)
    assert [line.new_key(name) for name in ("save", "save", "seed")] == [
        "save (1)",
        "save (2)",
        "seed (1)",
    ]


def test_without_the_client_of_jax_there_is_a_clear_error():
    with pytest.raises(hosts.HostsError, match=f"JAX {jax.__version__} has no .*key_value_set"):
        channel.open_channel()


def test_no_key_is_left_behind(service):
    def work(group):
        group.gather("parts", group.index)
        group.broadcast("seed", 4)
        group.agree("flags", {"a": 1})
        return group.exchange("all", group.index)

    assert run_on_each(work, n=3, service=service) == [[0, 1, 2]] * 3
    assert service.values == {}


def test_jax_has_the_methods():
    """`hosts.join` fails with a clear error otherwise."""
    from jaxlib import _jax

    for name in channel._METHODS:
        assert hasattr(_jax.DistributedRuntimeClient, name)
    assert issubclass(hosts.HostsError, RuntimeError)
