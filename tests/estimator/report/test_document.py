"""The pages in a real browser, and their frame."""

import threading
import time

import pytest

from support import browser
from tekoa.estimator.cli.flags import RunConfig
from tekoa.estimator.report import document, page, serve

needs_browser = pytest.mark.skipif(bool(browser.MISSING), reason=browser.MISSING or "-")
HOVER = """
const svg = document.querySelector('svg.chart'); svg.scrollIntoView();
const box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent('pointermove',
  {clientX: box.left + box.width * arguments[0], clientY: box.top + 50, bubbles: true}));
return document.querySelector('.tip').innerText;
"""
KEY = """
const svg = document.querySelector('svg.chart'); svg.focus();
svg.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}));
return document.querySelector('.tip').innerText;
"""
VISIBLE = """
return [...document.querySelectorAll('svg.chart')].map(svg => [...svg.querySelectorAll(
  'path[data-name]')].filter(path => getComputedStyle(path).display !== 'none')
  .map(path => path.dataset.name));
"""
BACKGROUND = "return getComputedStyle(document.body).backgroundColor"


def test_the_title_is_escaped():
    text = document.document("<b>", ["<p>x</p>"])
    assert "<title>&lt;b&gt;</title>" in text
    assert "data-live" not in text.partition("<style>")[0]


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_a_run_in_chromium(width, write_run, tmp_path):
    target = page.write_page(write_run(tmp_path / "run"), str(tmp_path / "run.html"))
    with browser.browser(width) as shown:
        shown.open(target.as_uri())
        assert shown.run("return document.documentElement.scrollWidth") == width
        assert shown.run(VISIBLE) == [["train", "valid"], ["valid"], ["ms per step"]]
        assert shown.run(HOVER, 0.5).splitlines() == ["step 20", "valid 0.9006", "train 0.8187"]
        assert shown.run(KEY, "End").splitlines()[0] == "step 50"
        assert shown.run(KEY, "ArrowLeft").splitlines()[0] == "step 40"
        tip = shown.run(
            "const [tip, card] = ['.tip', '.card:has(.tip)'].map(q => document.querySelector(q)"
            ".getBoundingClientRect()); return tip.left >= card.left && tip.right <= card.right"
        )
        assert tip is True
        shown.run("document.querySelector('.legend button').click()")
        assert shown.run(VISIBLE)[0] == ["valid"]
        colors = []
        for _ in range(3):
            shown.run("document.querySelector('.theme').click()")
            colors.append(shown.run(BACKGROUND))
        assert colors[0] != colors[1]
        assert shown.messages() == []


@needs_browser
@pytest.mark.slow
def test_the_comparison_in_chromium(write_run, tmp_path):
    for i, name in enumerate(("slow", "fast", "other")):
        write_run(tmp_path / "runs" / name, rate=0.1 * (i + 1), seed=i)
    target = tmp_path / "runs.html"
    page.run_page([str(tmp_path / "runs")], RunConfig(out=str(target)))
    rows = "return [...document.querySelectorAll('tr[data-run]')].filter(r => !r.hidden)"
    rows += ".map(r => r.dataset.run)"
    with browser.browser() as shown:
        shown.open(target.as_uri())
        assert shown.run(rows) == ["fast", "other", "slow"]
        for _ in range(2):
            shown.run("document.querySelectorAll('.runs th button')[3].click()")
        assert shown.run(rows) == ["slow", "fast", "other"]  # By loss, highest first.
        shown.run("document.querySelector('tr[data-run=fast] input').click()")
        assert shown.run(VISIBLE) == [["other", "slow"]] * 3
        shown.run(
            "const input = document.querySelector('.filter input'); input.value = 'SLO';"
            "input.dispatchEvent(new Event('input'))"
        )
        assert shown.run(rows) == ["slow"]
        assert shown.run(VISIBLE) == [["slow"]] * 3
        assert shown.messages() == []


@needs_browser
@pytest.mark.slow
def test_a_served_page_follows_the_run_and_keeps_what_is_hidden(write_run, tmp_path):
    run = write_run(tmp_path / "run", is_finished=False)

    def render():
        return page.render(page.gather(run), is_live=True)

    server = serve.make_server([run], render, port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    state = "return document.querySelector('.state').innerText"
    try:
        with browser.browser() as shown:
            shown.open(f"http://127.0.0.1:{server.server_port}/")
            assert shown.run(state) == "incomplete"
            shown.run("document.querySelector('.legend button').click()")
            time.sleep(2.5)
            (run / "train_end.json").write_text('{"step": 50}')
            deadline = time.monotonic() + 120
            while shown.run(state) != "finished":
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert shown.run(VISIBLE)[0] == ["valid"]
            messages = [m for m in shown.messages() if "favicon" not in m]
            assert messages == []
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
