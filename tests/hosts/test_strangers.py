"""Strangers at the port of process 0; with mutual TLS also those who speak its protocol."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import jax
import pytest

from support.processes import TRAIN, environment
from tekoa.store.commit import paths
from tekoa.store.formats.step import open_step

pytestmark = pytest.mark.slow

SLOW = "--module_config.step_seconds=0.1"
# Registers with the number of a process that runs.
IMPOSTOR = """
import importlib, sys, jax
jaxlib = importlib.import_module(jax.distributed.initialize.__module__)._jax
jaxlib.get_distributed_runtime_client(sys.argv[1], 1, init_timeout=5).connect()
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """The settings of a process that has a certificate."""
    directory = tmp_path_factory.mktemp("certificates")
    new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-x509"]
    key, cert, authority = (directory / name for name in ("node.key", "node.pem", "ca.pem"))

    def run(*words):
        subprocess.run([*map(str, words)], check=True, capture_output=True)

    run(*new, "-keyout", directory / "ca.key", "-out", authority, "-subj", "/CN=authority")
    names = ["-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    signed = ["-CA", authority, "-CAkey", directory / "ca.key"]
    run(*new, "-keyout", key, "-out", cert, *names, *signed)
    return {
        "JAX_MTLS_CERT_FILE": str(cert),
        "JAX_MTLS_KEY_FILE": str(key),
        "JAX_MTLS_CA_FILE": str(authority),
    }


def test_garbage_does_not_change_a_run(together, home):
    processes, address = start(together, home / "garbage", {})
    send_garbage(address)
    assert [process.wait()[0] for process in processes] == [0, 0], processes[0].output()


def test_without_mutual_tls_a_client_with_a_taken_number_ends_the_run(together, home):
    """The attack that the next test repeats; `docs/hosts.md` says that it is possible."""
    directory = home / "taken"
    processes, address = start(together, directory, {})
    register_as_process_1(address)
    for process in processes:
        assert process.wait()[0] in (69, -signal.SIGABRT), process.output()
    for step in paths.list_steps(directory):
        open_step(paths.step_dir(directory, step))


@pytest.mark.skipif(
    not hasattr(jax.config, "jax_mtls_cert_file"), reason="this JAX has no mutual TLS"
)
def test_strangers_do_not_change_a_run_with_mutual_tls(together, home, certificates):
    processes, address = start(together, home / "tls", certificates)
    send_garbage(address)
    assert register_as_process_1(address).returncode != 0
    assert [process.wait()[0] for process in processes] == [0, 0], processes[0].output()


def register_as_process_1(address):
    words = [sys.executable, "-c", IMPOSTOR, f"{address[0]}:{address[1]}"]
    return subprocess.run(words, env=environment(), capture_output=True, timeout=60, check=False)


def start(together, directory, env):
    processes = together(
        2, *TRAIN, SLOW, f"--model_dir={directory}", env={0: env, 1: env}, timeout=60
    )
    processes[0].wait_until(lambda: paths.list_steps(directory) != [])
    (flag,) = (w for w in processes[0].popen.args if w.startswith("--coordinator_address="))
    host, port = flag.partition("=")[2].split(":")
    return processes, (host, int(port))


def send_garbage(address):
    """Sends noise, a huge line, and opens 200 connections without a word."""
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(address, timeout=30))
        hello = b'{"hello":0.5,"of":2,"pid":1,"host":"x"}\n'
        for data in (
            os.urandom(100_000),
            hello,
            b"x" * 60_000_000,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ):
            # The service may hang up before it has read everything.
            with (
                socket.create_connection(address, timeout=30) as line,
                contextlib.suppress(OSError),
            ):
                line.sendall(data)
