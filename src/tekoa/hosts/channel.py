"""Values by key, on the coordination service of `jax.distributed`.

Process 0 runs the service. Each process has a client, which sends heartbeats from a thread of its
own and aborts the process when another one is lost.
"""

import collections
import importlib
import json
import threading
from typing import Any

from tekoa.hosts.connect import HostsError

_METHODS = (
    "blocking_key_value_get",
    "key_value_delete",
    "key_value_dir_get",
    "key_value_increment",
    "key_value_set",
    "key_value_try_get",
)
_ROOT = "tekoa"


def open_channel() -> "Channel":
    """Returns a channel over the client of `jax.distributed`, which must be initialized.

    Raises:
        HostsError: If this version of JAX has another client.
    """
    import jax

    # JAX has no public name for its client; Orbax uses the same object.
    module = importlib.import_module(jax.distributed.initialize.__module__)
    client = getattr(getattr(module, "global_state", None), "client", None)
    missing = [name for name in _METHODS if not hasattr(client, name)]
    if missing:
        raise HostsError(
            f"The client of jax.distributed in JAX {jax.__version__} has no {', '.join(missing)}. "
            "This version of JAX cannot connect several processes; install another one."
        )
    return Channel(client)


class Channel:
    """Sends JSON values among the processes of a group. All methods may be used in any thread.

    Args:
        client: The client of `jax.distributed`.
    """

    def __init__(self, client: Any):
        self._client = client
        self._n_uses: collections.Counter[str] = collections.Counter()
        self._counting = threading.Lock()

    def new_key(self, name: str) -> str:
        """Returns the next key for a name: the n-th call returns the same on all processes."""
        with self._counting:
            self._n_uses[name] += 1
            return f"{name} ({self._n_uses[name]})"

    def put(self, key: str, value: Any) -> None:
        """Sets the value of a key that has none yet."""
        self._client.key_value_set(f"{_ROOT}/{key}", json.dumps(value))

    def get(self, key: str, *, timeout_seconds: float = 0.0) -> Any:
        """Returns the value of a key, after waiting for it.

        A wait that ends in vain costs the service 15 kB until the key is set, so poll without a
        timeout to wait for long.

        Raises:
            TimeoutError: If the key is not set in time.
        """
        path, milliseconds = f"{_ROOT}/{key}", round(1000 * timeout_seconds)
        try:
            if milliseconds > 0:
                return json.loads(self._client.blocking_key_value_get(path, milliseconds))
            return json.loads(self._client.key_value_try_get(path))
        except RuntimeError as error:
            if not str(error).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
                raise
            raise TimeoutError(key) from None

    def list(self, directory: str) -> dict[str, Any]:
        """Returns the values of the keys `directory/...` that are set now."""
        prefix = f"{_ROOT}/{directory}/"
        pairs = self._client.key_value_dir_get(prefix)
        return {key.removeprefix(prefix): json.loads(text) for key, text in pairs}

    def drop(self, directory: str) -> None:
        """Deletes the keys `directory/...`."""
        self._client.key_value_delete(f"{_ROOT}/{directory}/")

    def count(self, key: str) -> int:
        """Adds one to a counter and returns it; a counter is not a value."""
        return self._client.key_value_increment(f"{_ROOT}/{key}", 1)
