"""Processes forked from one that has imported JAX and Tekoa: they start in no time.

The parent uses no device, so that its children start as new processes do. Variables that JAX and
Python read when they are imported are those of the parent; JAX's are set again in the child.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import warnings

_STATUS_BYTES = 8
_server = None


class Fork:
    """A child with the methods of `subprocess.Popen` that the tests use.

    Args:
        args: As for `Popen`: this Python, and `-m MODULE` or a file, and its arguments.
        env: All variables of its environment.
        stdout: The file for its output.
        stderr: The file for its errors.
    """

    def __init__(self, args, *, env, stdout, stderr):
        self.args, self.returncode = args, None
        self._status, status = os.pipe()
        request = {"args": [str(word) for word in args[1:]], "env": env, "cwd": os.getcwd()}
        message = json.dumps(request).encode()
        files = [stdout.fileno(), stderr.fileno(), status]
        socket.send_fds(_connection(env), [message], files)
        os.close(status)
        self.pid = self._read()

    def _read(self):
        data = os.read(self._status, _STATUS_BYTES)
        assert data, "the process that forks has ended"
        return int.from_bytes(data, sys.byteorder, signed=True)

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._read()
            os.close(self._status)
        return self.returncode

    def poll(self):
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _connection(env):
    """Returns the socket of the process that forks; starts it if there is none yet."""
    global _server
    if _server is None:
        _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, __file__, str(theirs.fileno())]
        # Variables of JAX concern one child.
        env = {name: text for name, text in env.items() if not name.startswith("JAX_")}
        process = subprocess.Popen(words, env=env, pass_fds=[theirs.fileno()])
        theirs.close()
        atexit.register(_end, process)
    return _server


def _end(process):
    _server.close()
    process.wait()


def _serve(connection):
    """Forks for every request; returns in the children only, with the request."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, 2**20, 3)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG if message else 0)[0]:
                pass
        if not message:
            sys.exit()
        if _fork() == 0:
            connection.close()
            break
        for file in files:
            os.close(file)
    stdout, stderr, status = files
    child = _fork()
    if child:  # Waits for the child and reports its end.
        os.write(status, child.to_bytes(_STATUS_BYTES, sys.byteorder, signed=True))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(status, code.to_bytes(_STATUS_BYTES, sys.byteorder, signed=True))
        os._exit(0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for file in files:
        os.close(file)
    return json.loads(message)


def _fork():
    with warnings.catch_warnings():
        # JAX warns of its threads, but it has started none.
        warnings.simplefilter("ignore")
        return os.fork()


def _run(args, env, cwd):
    import runpy

    import jax

    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for variable, text in env.items():
        name = variable.lower()
        if variable.startswith("JAX_") and hasattr(jax.config, name):
            kind = type(getattr(jax.config, name))
            jax.config.update(name, kind(text) if kind in (int, float) else text)
    if args[0] == "-m":
        sys.argv, sys.path[0] = args[1:], cwd
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = args, os.path.dirname(args[0])
        runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    import optax  # noqa: F401
    import tensorstore  # noqa: F401
    from flax import linen, nnx  # noqa: F401

    from tekoa.estimator.modes import evaluate, train  # noqa: F401

    _run(**_serve(socket.socket(fileno=int(sys.argv[1]))))
