"""`echelon report --live` of a real run in progress: in the terminal, by HTTP, and in a browser."""

import re
import shutil
import signal
import urllib.request

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import await_line, finish, start, write_recipe

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture
def run(tmp_path):
    """A run of two processes that has made some steps and goes on; and the folder that it is in."""
    write_recipe(tmp_path, train={"steps": 100_000})
    process = start("train", "recipe.json", "--nproc", "2", cwd=tmp_path)
    folder = RunFolder(tmp_path / "runs" / "tiny")
    await_line(folder.metrics_path, '"step": 5,', process, seconds=120)
    yield process, folder
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        finish(process)


def last_step(folder):
    return [row["step"] for row in folder.read_metrics().rows][-1]


def test_the_terminal_shows_a_run_until_it_ends(run, tmp_path):
    process, folder = run
    watching = start("report", "tiny", "--live", cwd=tmp_path)
    first = [watching.stdout.readline() for _ in range(4)]  # the title and the step of the first state
    before = last_step(folder)
    while last_step(folder) < before + 20:
        assert process.poll() is None and watching.poll() is None
    process.send_signal(signal.SIGTERM)
    finish(process)
    ended = finish(watching)
    assert ended.code == 0 and ended.err == ""
    out = "".join(first) + ended.out
    shown = [int(step) for step in re.findall(r"^steps +(\d+)/100000$", out, re.MULTILINE)]
    assert len(shown) >= 2 and shown == sorted(shown) and shown[0] < shown[-1] == last_step(folder)
    assert "tiny: running" in out and "in collectives" in out


def test_a_browser_follows_a_run(run, tmp_path, request):
    assert run[0].poll() is None
    serving = start("report", "tiny", "--web", cwd=tmp_path)
    request.addfinalizer(serving.kill)
    address = re.search(r"http://127\.0\.0\.1:\d+/", serving.stdout.readline())[0]
    with urllib.request.urlopen(address, timeout=30) as answer:
        assert answer.status == 200 and "tiny <small" in answer.read().decode()
    browsers = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium or Chrome")
    with browsers.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 360, "height": 800})
        asked, said = set(), []
        page.on("request", lambda request: asked.add(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.goto(address)
        first = page.locator(".figures dd").first.inner_text()
        browsers.expect(page.locator(".figures dd").first).not_to_have_text(first, timeout=60_000)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360 and page.locator("svg").count() >= 2
        assert asked == {address} and said == [] and page.locator("h1 small").inner_text() == "running"
        serving.send_signal(signal.SIGINT)
        assert finish(serving).code == 0
        browsers.expect(page.locator("h1")).to_contain_text("does not answer", timeout=60_000)
