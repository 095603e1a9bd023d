"""`tekoa page --serve`: the page from a server on this machine, up to date at every request."""

import functools
import hashlib
import http.server
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

from tekoa.estimator.cli.run_config import UsageError

_HOST = "127.0.0.1"
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)
# Files that change without any effect on the page.
_IGNORED = (".lease", ".lock")


def serve(directories: Sequence[pathlib.Path], render: Callable[[], str], *, port: int) -> None:
    """Serves a page until Ctrl-C.

    Raises:
        UsageError: If the port is in use.
    """
    server = make_server(directories, render, port=port)
    with server:
        address = f"http://{_HOST}:{server.server_port}/"
        print(f"Serving {address} for this machine only. Ctrl-C ends it.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("Stopped.", file=sys.stderr)


def make_server(
    directories: Sequence[pathlib.Path], render: Callable[[], str], *, port: int
) -> http.server.ThreadingHTTPServer:
    """Returns a server of a page that is rendered again after files have changed.

    Args:
        directories: The directories whose files the page shows.
        render: Returns the page.
        port: The port; 0 chooses a free one.
    """

    @functools.lru_cache(maxsize=1)
    def page(tag: str) -> bytes:
        del tag  # Another page for another state of the files.
        return render().encode(errors="backslashreplace")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another host, whose name leads here, must not read the run.
            host = self.headers.get("Host", "").partition(":")[0]
            if host not in (_HOST, "localhost") or self.path != "/":
                self.send_error(404)
                return
            tag = f'"{fingerprint(directories)}"'
            if self.headers.get("If-None-Match") == tag:
                self._reply(304, tag, b"")
            else:
                self._reply(200, tag, page(tag))

        def _reply(self, status: int, tag: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Security-Policy", _POLICY)
            self.send_header("Cache-Control", "no-cache")
            self.send_header("ETag", tag)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing: a page that is open asks every two seconds."""

    try:
        return http.server.ThreadingHTTPServer((_HOST, port), Handler)
    except OSError as error:
        raise UsageError(f"--port={port} cannot be used: {error.strerror}.") from None


def fingerprint(directories: Sequence[pathlib.Path]) -> str:
    """Returns a text that changes when a file of a run appears, grows or disappears."""
    digest = hashlib.sha256()
    for directory in directories:
        for entry in _entries(directory):
            digest.update(repr(entry).encode())
    return digest.hexdigest()[:24]


def _entries(directory: pathlib.Path) -> Iterator[tuple[str, int, int]]:
    for path in sorted(directory.iterdir()):
        if path.suffix in _IGNORED or path.name.startswith("."):
            continue
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        yield str(path), status.st_size, status.st_mtime_ns
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("checkpoint_"):
            yield from _entries(path)
