"""Measures the cost of exchanges, stops, saves and restores by the number of processes.

    python bench/hosts.py

The exchange, and what it costs process 0 that all wait for it, are measured with as many clients
of JAX's coordination service as there would be processes: process 0 is one, the others are threads
of a few processes of this machine. Stops, saves and restores are of real processes, which share
the cores and the disk of one machine: 64 MB in 16 arrays, split over them. The result is the cost
of coordination, not the gain of many disks.
"""

import importlib
import json
import os
import pathlib
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from tekoa.estimator.cli.launch import free_port

N_ROUNDS = 7
N_ARRAYS, N_ELEMENTS = 16, 1 << 20
VALUE = "x" * 2000
CLIENTS_PER_PROCESS = 250
IDLE_SECONDS = 8


def main():
    if len(sys.argv) > 1:
        kind, *words = sys.argv[1:]
        {"clients": serve_clients, "store": store, "stop": stop}[kind](*words)
        return
    print("clients   gather   exchange   (2 kB each, median)   idle: share of a core of process 0")
    for n in (2, 10, 100, 500, 1000):
        rows = json.loads(run("clients", n, 1 - (1 - n) // CLIENTS_PER_PROCESS))
        gather, exchange, idle = rows
        print(f"{n:7}   {1e3 * gather:5.0f} ms   {1e3 * exchange:5.0f} ms   {idle:25.1%}")
    print("processes   save   restore   (seconds, median)   from a signal to the stop of all")
    for n in (1, 2, 4):
        with tempfile.TemporaryDirectory() as directory:
            save, restore = json.loads(run("store", n, n, directory))
        seconds = json.loads(run("stop", n, n)) if n > 1 else 0.0
        print(f"{n:9}   {save:.3f}   {restore:.3f}   {seconds:38.1f}")


def run(kind, n, n_processes, *words):
    """Runs `kind` in some processes and returns the last line of process 0."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, kind, *map(str, (n, index, port, *words))],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for index in range(n_processes)
    ]
    outs = [process.communicate()[0] for process in processes]
    return outs[0].splitlines()[-1]


def serve_clients(n, index, port):
    """Runs process 0, or up to `CLIENTS_PER_PROCESS` of the other clients, each in a thread."""
    import jax

    from tekoa import hosts
    from tekoa.hosts.channel import Channel

    n, index = int(n), int(index)
    # `hosts.join` connects one client per process, so the clients are created as JAX does.
    jaxlib = importlib.import_module(jax.distributed.initialize.__module__)._jax
    address = f"127.0.0.1:{port}"
    if index == 0:
        service = jaxlib.get_distributed_runtime_service(address, n)
    first = 1 + (index - 1) * CLIENTS_PER_PROCESS
    numbers = range(first, min(n, first + CLIENTS_PER_PROCESS)) if index else [0]
    clients = [jaxlib.get_distributed_runtime_client(address, i) for i in numbers]
    times = {"gather": [], "exchange": []}
    idle = []

    def work(number, client):
        client.connect()
        group = hosts.Hosts(index=number, count=n, channel=Channel(client))
        for kind, seconds in times.items():
            for turn in range(N_ROUNDS):
                group.exchange(f"start of {kind} {turn}")
                start = time.perf_counter()
                getattr(group, kind)(f"{kind} {turn}", VALUE)
                if number == 0:
                    seconds.append(time.perf_counter() - start)
        if number == 0:
            before, start = cpu_seconds(), time.perf_counter()
            time.sleep(IDLE_SECONDS)
            idle.append((cpu_seconds() - before) / (time.perf_counter() - start))
        # The others wait as for a process 0 that is busy.
        group.exchange("end")

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(numbers, clients, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if index == 0:
        medians = [statistics.median(seconds) for seconds in times.values()]
        print(json.dumps([*medians, *idle]), flush=True)
        time.sleep(2)  # The others exit first.
        del service
    os._exit(0)


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def stop(n, index, port):
    """Measures the seconds from a signal to the last process until all have agreed to stop."""
    from tekoa import hosts

    n, index = int(n), int(index)
    group = hosts.join(f"127.0.0.1:{port}", n, index)
    with hosts.stop_flag() as flag:
        group.exchange("start")
        start = time.time()
        if index == n - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        while not flag.is_set():
            time.sleep(0.01)
        ends = group.exchange("end", [start, time.time()])
    if group.is_writer:
        print(max(end for _, end in ends) - ends[-1][0], flush=True)
    group.leave(0)


def store(n, index, port, directory):
    """Measures a save and a restore, in one of the processes."""
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
    with Store(pathlib.Path(directory)) as writer:
        for step in range(N_ROUNDS):
            group.exchange("save")
            start = time.perf_counter()
            writer.save(step, {"model_params": tree})
            writer.wait()
            saves.append(time.perf_counter() - start)
            start = time.perf_counter()
            writer.restore({"model_params": tree})
            restores.append(time.perf_counter() - start)
    if group.is_writer:
        print(json.dumps([statistics.median(saves), statistics.median(restores)]), flush=True)
    group.leave(0)


if __name__ == "__main__":
    main()
