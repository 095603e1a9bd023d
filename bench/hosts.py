"""Measures the cost of an exchange, a save and a restore by the number of processes.

    python bench/hosts.py

The hub's part of an exchange is measured with as many connections as there would be
processes, all on this machine. Saves and restores are of 64 MB in 16 arrays, split over
the processes, which share the cores and the disk of one machine. The result is the cost
of coordination, not the gain of many disks.
"""

import json
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from tekoa.estimator.cli.launch import free_port
from tekoa.hosts import hub as hub_lib

N_ROUNDS = 7
N_ARRAYS, N_ELEMENTS = 16, 1 << 20


def main():
    if len(sys.argv) > 1:
        work(*sys.argv[1:])
        return
    print("connections   one exchange")
    for n in (1, 2, 10, 100, 1000):
        print(f"{n:11}   {1e3 * exchange_seconds(n):8.2f} ms")
    print("processes   save   restore   (seconds, median)")
    for n in (1, 2, 4):
        save, restore = store_seconds(n)
        print(f"{n:9}   {save:.3f}   {restore:.3f}")


def exchange_seconds(n):
    """Returns the seconds from the first value sent to the last reply read."""
    hub = hub_lib.Hub("127.0.0.1", 0, n_processes=n, timeout_seconds=600)
    peers = [socket.create_connection(("127.0.0.1", hub.port)) for _ in range(n)]
    lines = [peer.makefile("rb") for peer in peers]
    for index, peer in enumerate(peers):
        send(peer, hello=index, of=n, pid=1, host="here")
    for line in lines:
        hear(line, "welcome")
    seconds = []
    for turn in range(N_ROUNDS):
        start = time.perf_counter()
        for peer in peers:
            send(peer, at=f"turn {turn}", value=turn, timeout=600)
        for line in lines:
            hear(line, "all")
        seconds.append(time.perf_counter() - start)
    for thing in (hub, *lines, *peers):
        thing.close()
    return statistics.median(seconds)


def send(peer, **message):
    peer.sendall(json.dumps(message).encode() + b"\n")


def hear(lines, kind):
    # Not parsed: on a cluster each process parses its own line.
    while f'"{kind}"'.encode() not in lines.readline():
        pass


def store_seconds(n):
    """Returns the median seconds of a save and of a restore with n processes."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        words = [[str(n), str(index), str(port), directory] for index in range(n)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *word],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for word in words
        ]
        outs = [process.communicate()[0] for process in processes]
    return json.loads(outs[0].splitlines()[-1])


def work(n, index, port, directory):
    """Runs one of the processes."""
    import jax
    import numpy as np

    from tekoa import hosts
    from tekoa.store.store import Store

    n, index = int(n), int(index)
    group = hosts.Hosts() if n == 1 else hosts.join(f"127.0.0.1:{port}", n, index)
    mesh = jax.make_mesh((n,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    host = np.random.default_rng(0).normal(size=N_ELEMENTS).astype(np.float32)
    tree = {
        str(i): jax.make_array_from_callback(host.shape, rows, lambda part: host[part])
        for i in range(N_ARRAYS)
    }
    saves, restores = [], []
    with Store(pathlib.Path(directory)) as store:
        for step in range(N_ROUNDS):
            group.exchange("save")
            start = time.perf_counter()
            store.save(step, {"model_params": tree})
            store.wait()
            saves.append(time.perf_counter() - start)
            start = time.perf_counter()
            store.restore({"model_params": tree})
            restores.append(time.perf_counter() - start)
    if group.is_writer:
        print(json.dumps([statistics.median(saves), statistics.median(restores)]))
    group.leave(0)


if __name__ == "__main__":
    main()
