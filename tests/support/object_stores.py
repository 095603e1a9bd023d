"""Servers of object stores on this machine, of S3 and of Google Cloud Storage, in this process."""

import functools
import http.server
import io
import json
import logging
import threading
import urllib.parse

import pytest


class S3:
    """A server of S3, by moto. Its contents outlive a stop."""

    url = "s3://bucket/run"

    def __init__(self):
        pytest.importorskip("s3fs", reason="the 'cloud' extra is not installed")
        moto = pytest.importorskip("moto.server", reason="moto is not installed")
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self._server._port = self._server.get_host_and_port()[1]

    def start(self):
        self._server.start()

    def stop(self):
        self._server.stop()

    fail, recover = stop, start

    @property
    def variables(self):
        """The environment of its clients."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server._port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


class Google:
    """A server of Google Cloud Storage, by gcp-storage-emulator. Its contents outlive a stop.

    The emulator has generations of objects but ignores the conditions of requests. They are
    checked here, as Google documents them, unless `has_conditions` is False. Uploads in two parts
    are unpacked here too: the emulator drops a carriage return at their end.
    """

    url = "gs://bucket/run"

    def __init__(self, *, has_conditions=True):
        pytest.importorskip("gcsfs", reason="the 'cloud' extra is not installed")
        emulator = pytest.importorskip(
            "gcp_storage_emulator.server", reason="gcp-storage-emulator is not installed"
        )
        logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
        logging.getLogger("api").setLevel(logging.CRITICAL)
        storage = emulator.Storage(use_memory_fs=True)
        handler = _that_may_refuse(emulator.RequestHandler)
        handler = _with_conditions(handler) if has_conditions else handler
        self._handler = functools.partial(handler, storage)
        self._port = 0
        self.start()

    def start(self):
        # It answers one request after the other, so a condition holds until its write is done.
        self._server = http.server.HTTPServer(("127.0.0.1", self._port), self._handler)
        self._port = self._server.server_port
        self._server.is_refusing = False
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()

    def fail(self):
        """Refuses all requests: for a server that does not answer, gcsfs waits half a minute."""
        self._server.is_refusing = True

    def recover(self):
        self._server.is_refusing = False

    @property
    def variables(self):
        """The environment of its clients."""
        host = f"http://127.0.0.1:{self._port}"
        # It needs no credentials, so Google's library need not look for a machine that has them.
        return {"STORAGE_EMULATOR_HOST": host, "NO_GCE_CHECK": "true"}


def _with_conditions(handler):
    class Handler(handler):
        def do_GET(self):  # noqa: N802
            self._answer(super().do_GET, "generation", 404)

        def do_POST(self):  # noqa: N802
            if self.headers.get_content_type() == "multipart/related":
                self._unpack()
            self._answer(super().do_POST, "ifGenerationMatch", 412)

        def _unpack(self):
            """Turns an upload of a description and bytes into one of bytes only."""
            mark = b"--" + self.headers.get_boundary().encode()
            body = self.rfile.read(int(self.headers["Content-Length"]))
            _, facts, rest = body.split(mark, 2)
            content = rest.partition(b"\n\n")[2].removesuffix(b"\n" + mark + b"--")
            name = json.loads(facts.partition(b"\n\n")[2])["name"]
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query)) | {"uploadType": "media", "name": name}
            self.path = f"{url.path}?{urllib.parse.urlencode(query)}"
            self.headers.replace_header("Content-Type", "application/octet-stream")
            self.headers.replace_header("Content-Length", str(len(content)))
            self.rfile = io.BytesIO(content)

        def _answer(self, answer, field, code):
            """Answers, or refuses with a code if a field is not the object's generation."""
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query))
            expected = query.get(field)
            if expected is None or expected == self._generation(url.path, query):
                answer()
                return
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.dumps({"error": {"code": code, "message": f"{field} differs"}}).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _generation(self, path, query):
            """Returns the generation of the object of a request; '0' if there is none."""
            bucket, _, name = path.partition("/b/")[2].partition("/o")
            name = query.get("name") or urllib.parse.unquote(name.removeprefix("/"))
            return self.storage.objects.get(bucket, {}).get(name, {}).get("generation", "0")

    return Handler


def _that_may_refuse(handler):
    class Handler(handler):
        def parse_request(self):
            is_valid = super().parse_request()
            if is_valid and self.server.is_refusing:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_error(403)
                return False
            return is_valid

    return Handler


SERVERS = {"s3": S3, "gs": Google}
