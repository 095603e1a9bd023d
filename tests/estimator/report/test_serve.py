import threading
import urllib.error
import urllib.request

import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.report import serve


@pytest.fixture
def served(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "events").write_text("a")
    texts = []

    def render():
        texts.append((tmp_path / "train" / "events").read_text())
        return f"<p>{texts[-1]}</p>"

    server = serve.make_server([tmp_path], render, port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server, tmp_path, texts
    server.shutdown()
    thread.join()
    server.server_close()


def get(server, path="/", **headers):
    url = f"http://127.0.0.1:{server.server_port}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as reply:
            return reply.status, reply.read().decode(), reply.headers["ETag"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", error.headers["ETag"]


def test_the_page_is_rendered_again_only_after_a_change(served):
    server, directory, texts = served
    _, text, tag = get(server)
    assert text == "<p>a</p>"
    assert get(server, **{"If-None-Match": tag})[0] == 304
    assert get(server)[1] == "<p>a</p>"
    assert texts == ["a"]
    (directory / "writer.lease").write_text("renewed")
    assert get(server, **{"If-None-Match": tag})[0] == 304
    (directory / "train" / "events").write_text("ab")
    status, text, new_tag = get(server, **{"If-None-Match": tag})
    assert (status, text) == (200, "<p>ab</p>")
    assert new_tag != tag


def test_only_this_machine_and_only_the_page_are_served(served):
    server, *_ = served
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, Host="evil.example")[0] == 404
    assert get(server, path="/run.json")[0] == 404


def test_a_port_in_use_is_a_usage_error(served):
    server, directory, _ = served
    with pytest.raises(UsageError, match=f"--port={server.server_port} cannot be used"):
        serve.make_server([directory], str, port=server.server_port)
