"""The coordination service of JAX, for groups whose processes are threads."""

import concurrent.futures
import threading

from tekoa import hosts
from tekoa.hosts.channel import Channel


class Service:
    """Has the methods and errors of the client of `jax.distributed`."""

    def __init__(self):
        self.values, self._change = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self._change:
            if key in self.values:
                raise RuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.values[key] = value
            self._change.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self._change:
            if not self._change.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: timed out with key {key}")
            return self.values[key]

    def key_value_try_get(self, key):
        if key not in self.values:
            raise RuntimeError(f"NOT_FOUND: Config key {key} not found.")
        return self.values[key]

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in list(self.values.items()) if key.startswith(prefix)]

    def key_value_delete(self, prefix):
        with self._change:
            for key, _ in self.key_value_dir_get(prefix):
                del self.values[key]

    def key_value_increment(self, key, increment):
        with self._change:
            self.values[key] = str(int(self.values.get(key, 0)) + increment)
            return int(self.values[key])


def run_on_each(work, n=2, service=None):
    """Runs `work(group)` as n processes; returns results or errors, in order."""
    service = service or Service()
    groups = [hosts.Hosts(index=i, count=n, channel=Channel(service)) for i in range(n)]

    def run(group):
        try:
            return work(group)
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, groups))
