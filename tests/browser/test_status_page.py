"""The daemon's status page in a real browser: what it says, to whom, and how it looks."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from ecd_client import Client, EntryTooLarge
from support.daemon import Daemon
from support.processes import run
from support.waiting import HANG_S

OpenPage = Callable[..., Page]
MIB = 1 << 20
TOKEN = "a secret of the test"
EVIL = "<img src=x onerror=\"document.title='evil'\">"


def url(daemon: Daemon) -> str:
    return daemon.metrics_url().removesuffix("metrics")


def put(client: Client, key: str, nbytes: int = 1, namespace: str = "default") -> None:
    client.put_bytes(key, bytes(nbytes), "uint8", (nbytes,), cost=2.0, namespace=namespace)


def status_of(daemon: Daemon) -> dict:
    command = [sys.executable, "-m", "ecd_client.cli.main", "--address", daemon.address]
    return json.loads(run([*command, "status", "--json"], capture_output=True).stdout)


def document(daemon: Daemon, query: str = "") -> dict:
    with urllib.request.urlopen(f"{url(daemon)}status.json{query}") as answer:
        return json.load(answer)


def tile(page: Page, name: str) -> str:
    """The number on a tile, and the line below it."""
    [texts] = [t.split("\n") for t in page.locator("#tiles > div").all_inner_texts() if name in t]
    return " | ".join(text for text in texts[1:] if text)


def with_content(daemon: Daemon) -> None:
    """Entries of many names, lookups that hit and miss, a refusal."""
    names = ["Qwen/Qwen2.5-VL-7B-Instruct", "n" * 1000, "two words", "\u202eleft to right", EVIL]
    with Client(daemon.address) as client:
        for number, name in enumerate(names):
            put(client, "k", MIB * (number + 1), name)
            for key in ("k", "absent"):
                if item := client.get(key, namespace=name):
                    item.close()
        with pytest.raises(EntryTooLarge):
            put(client, "too large", 100 * MIB)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with content, and two other nodes that it cannot reach."""
    daemon = Daemon(
        tmp_path_factory.mktemp("busy"),
        ECD_PEER_ADDRESS="127.0.91.1:9465",
        ECD_PEER_TOKEN=TOKEN,
        ECD_PEERS="127.0.91.2:9465,127.0.91.3:9465",
        ECD_DIRECTORY="static",
        ECD_ENGINE_PORTS="30100-30131",
        ECD_WARM_RESTART="false",
    )
    try:
        daemon.start()
        with_content(daemon)
        with Client(daemon.address) as client:
            assert client.get("absent", 1.0) is None  # for which the other nodes are asked
        yield daemon
    finally:
        daemon.close()


def test_the_page_says_what_status_says_and_follows_it(
    make_daemon: Callable[..., Daemon], open_page: OpenPage
) -> None:
    daemon = make_daemon().start()
    page = open_page(url(daemon))
    expect(page.locator("#state")).to_have_text("serving, healthy")
    assert tile(page, "Encodes saved") == "- | 0 of 0, 0 s"
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with Client(daemon.address, uses_puts=True) as client:
        for number in range(1200):
            put(client, f"{number}")
        for number in range(3):
            client.get(f"{number}").close()
        assert client.get("absent") is None
        expect(page.locator("#tiles")).to_contain_text("of 4 lookups")
        expect(page.locator("#tiles")).to_contain_text("1,200 puts")
        daemon.wait_idle()
        told, said = status_of(daemon), document(daemon)["status"]
        assert tile(page, "Encodes saved") == "75.0% | 3 of 4, 6 s"
        assert tile(page, "Hits") == "3 | of 4 lookups, 0 handed over, 3 bytes"
        assert tile(page, "Entries") == f"{told['entries']:,} | {told['counters']['puts']:,} puts"
        assert tile(page, "Sessions").startswith(f"{told['sessions']} | ")
        cells = page.locator("#spaces tbody td").all_inner_texts()
        assert cells[1:] == ["1,200", "1.2 KiB", "100%", "3", "1", "6 s"]
        assert (
            page.locator("#more").inner_text().split("Incarnation")[1].strip()
            == told["incarnation"][:12]
        )
        assert told.pop("address") == daemon.address
        for each in (told, said):
            each.pop("uptime_s")
        assert said == told
    assert asked
    assert {urlsplit(each)[:2] for each in asked} == {urlsplit(url(daemon))[:2]}
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {get: () => true, configurable: true})"
    )
    assert page.evaluate(LOOK) == [0, 0], "nobody looks at a page that is hidden"
    with page.expect_request("**/status.json*", timeout=HANG_S * 1e3):
        page.evaluate(
            "delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))"
        )
    assert page.evaluate(LOOK) == [1, 1], "and again once it is seen"


LOOK = """async () => {  // as when its timer ends: what it asks for, and the timers that it sets
  while (asking) await new Promise(requestAnimationFrame);
  const [ask, time] = [fetch, setTimeout];
  let asked = 0, timed = 0;
  window.fetch = (...about) => { asked += 1; return ask(...about); };
  window.setTimeout = (...about) => { timed += 1; return time(...about); };
  await look();
  [window.fetch, window.setTimeout] = [ask, time];
  return [asked, timed];
}"""


def test_names_are_text_and_lists_are_bounded(daemon: Daemon, open_page: OpenPage) -> None:
    with_content(daemon)
    with Client(daemon.address) as client:
        for number in range(60):
            put(client, "k", namespace=f"small {number}")
    page = open_page(url(daemon))
    names = page.locator("#spaces td:first-child bdi")
    expect(names).to_have_count(51)
    shown = names.all_text_contents()
    assert EVIL in shown
    assert shown[-1] == "all others together"
    assert max(map(len, shown)) < 150
    assert page.locator("img").count() == 0
    assert "evil" not in page.title()
    expect(page.locator("#refusals")).to_contain_text("1 put larger than the pool")
    expect(page.locator("#refusals")).to_contain_text("raise ECD_HOST_POOL_BYTES")
    expect(page.locator("#bad")).to_contain_text("1 put larger than the pool")


def test_the_page_says_that_the_daemon_is_away_and_finds_it_again(
    make_daemon: Callable[..., Daemon], browser: Browser
) -> None:
    daemon = make_daemon().start()
    place = url(daemon)
    daemon._settings["ECD_METRICS_ADDRESS"] = urlsplit(place).netloc
    page = browser.new_page()  # whose console has the failures
    with contextlib.closing(page):
        page.goto(place)
        expect(page.locator("#state")).to_have_text("serving, healthy")
        before = page.locator("#more").inner_text()
        daemon.kill()
        expect(page.locator("#away")).to_be_visible()
        expect(page.locator("#away")).to_contain_text("The daemon has not answered since")
        expect(page.locator("#state")).to_have_text("no answer")
        assert page.locator("#more").inner_text() == before, "the last figures stay"
        daemon.start()
        expect(page.locator("#state")).to_have_text("serving, healthy")
        expect(page.locator("#away")).to_be_hidden()
        assert page.locator("#more").inner_text() != before


def test_everything_is_reached_by_keyboard(busy: Daemon, open_page: OpenPage) -> None:
    page = open_page(url(busy))
    page.wait_for_selector("main:not([hidden])")
    order = []
    for _ in range(8):
        page.keyboard.press("Tab")
        order.append(
            page.evaluate(
                "(e => e.tagName.toLowerCase() + ' ' + (e.ariaLabel || e.innerText || e.value))"
                "(document.activeElement)"
            )
        )
        if order[-1].startswith("input"):
            page.keyboard.press("ArrowRight")
            assert page.locator("input:checked").input_value() == "3600"
        if order[-1].startswith("summary"):
            page.keyboard.press("Enter")
            expect(page.locator("#good")).to_be_visible()
        if order[-1].startswith("svg Memory"):
            page.keyboard.press("Home")
            chart = page.locator("#used svg")
            expect(chart).to_have_attribute("aria-valuenow", "0")
            assert chart.get_attribute("aria-valuetext").startswith("0 bytes")
            assert "now" not in page.locator("#used output").inner_text()
    assert [each.split(" ")[0] for each in order] == (
        ["summary", "input", "svg", "svg", "svg", "a", "a", "body"]
    )
    assert order[2] == "svg Encodes saved over time"


def test_a_curve_that_is_read_may_lose_its_points(busy: Daemon, open_page: OpenPage) -> None:
    """As when the daemon starts anew: for its first seconds a curve has none."""
    page = open_page(url(busy))
    page.wait_for_selector("main:not([hidden])")
    page.locator("#ratio svg").focus()
    page.keyboard.press("Home")
    said = page.evaluate(
        """() => {  // in one go, as the page draws the daemon's own points every two seconds
          const {ratio} = charts;
          ratio.show([], '');
          ratio.svg.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}));
          const without = ratio.value.innerText;
          ratio.show([[2000, 0.5, 1000], [3000, 1, 2000]], '2 s');
          return [without, ratio.value.innerText];
        }"""
    )
    assert said == ["nothing to save now", "100% now"]


def test_a_curve_of_one_value_and_one_of_none_say_so(daemon: Daemon, open_page: OpenPage) -> None:
    page = open_page(url(daemon))
    page.wait_for_selector("main:not([hidden])")
    said = page.evaluate(
        """() => [[[2000, null, 1000]], [[2000, 1, 1000], [3000, 1, 2000]],
                  [[2000, 0, 1000], [3000, 1, 2000]]].map((points) => {
          charts.ratio.show(points, '2 s');
          return charts.ratio.sum.innerText;
        })"""
    )
    assert said == [
        "Nothing to save in the last 2 s.",
        "Always 100% in the last 2 s.",
        "Between 0% and 100% in the last 2 s.",
    ]


def test_the_head_counts_what_there_is_to_fix(busy: Daemon, open_page: OpenPage) -> None:
    """Configured nodes that cannot be reached, and an entry larger than the pool."""
    expected = "serving, 1 thing to fix, 1 to look at"
    expect(open_page(url(busy)).locator("#state")).to_have_text(expected)


def test_rates_are_of_one_run_of_the_daemon_and_of_the_last_seconds(
    busy: Daemon, open_page: OpenPage
) -> None:
    """A hidden tab sees a restarted daemon when that is up for longer than the last one was."""
    page = open_page(url(busy))
    expect(page.locator("#tiles")).to_contain_text("puts/s")
    looks = [("a", 1000, 90), ("b", 5000, 10), ("b", 5002, 20), ("b", 9000, 20)]
    lookups = page.evaluate(
        """looks => looks.map(([incarnation, uptime_s, hits]) => rates(
             {incarnation, uptime_s, counters: {hits, misses: 0, bytes_out: 0, puts: 0}}
           )?.lookups)""",
        looks,
    )
    assert lookups == [None, None, 5, None]


FAULTS = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).slice(0, 3).map((v) => v / 255)
      .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (numbers(colour)[3] !== 0) return colour;
    }
  };
  const faults = [];
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) faults.push("the page scrolls sideways");
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  for (let text; (text = texts.nextNode());) {
    const of = text.parentElement;
    if (!text.data.trim() || !of.checkVisibility() || of.closest("script, style, thead")) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const box = range.getBoundingClientRect();
    seen += 1;
    if (box.left < 0 || box.right > width + 0.5) faults.push("cut: " + text.data);
    const card = (of.closest(".card") || document.body).getBoundingClientRect();
    if (box.right > card.right) faults.push("out of its card: " + text.data);
    const lights = [getComputedStyle(of).color, behind(of)].map(light).sort((a, b) => b - a);
    const contrast = (lights[0] + 0.05) / (lights[1] + 0.05);
    if (contrast < 4.5) faults.push(`contrast ${contrast.toFixed(2)}: ${text.data}`);
  }
  return {faults, seen};
}"""


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_whole_and_legible(
    busy: Daemon, open_page: OpenPage, scheme: str, width: int, tmp_path: Path
) -> None:
    page = open_page(url(busy), width, color_scheme=scheme)
    expect(page.locator("#peers")).to_contain_text("127.0.91.3:9465")
    page.locator("summary").click()
    found = page.evaluate(FAULTS)
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert found["faults"] == [], tmp_path
    assert found["seen"] > 80
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(243, 245, 248)"
    assert light == (scheme == "light")


def asked(
    daemon: Daemon, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    place = urlsplit(url(daemon))
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=HANG_S)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()


@pytest.mark.parametrize("path", ["/", "/status.json"])
def test_the_port_lets_nobody_write_and_no_other_site_read(busy: Daemon, path: str) -> None:
    answer, body = asked(busy, path)
    assert (answer.status, len(body) > 1000) == (200, True)
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert not [name for name in answer.headers if name.startswith("Access-Control")]
    head, nothing = asked(busy, path, "HEAD")
    assert (head.status, nothing) == (200, b"")
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert asked(busy, path, method)[0].status == 405
    for host in ("evil.example", "evil.example:80", "localhost.evil.example"):
        assert asked(busy, path, Host=host)[0].status == 403
    for host in ("localhost:9464", "127.0.0.1", "[::1]:9464"):
        assert asked(busy, path, Host=host)[0].status == 200


def test_every_path_is_known_and_refuses_other_sites(busy: Daemon) -> None:
    assert b"ecd_entries" in asked(busy, "/metrics")[1]
    for path in (
        "/metrics",
        "/metrics?name[]=ecd_entries",
        "/v1/locate",
        "/readyz",
        "/nothing",
        "//",
    ):
        for host in ("evil.example", "evil@localhost"):
            answer, body = asked(busy, path, Host=host)
            assert answer.status == 403
            assert b"ecd_" not in body
    for path in ("/nothing", "/metrics/", "/favicon.ico"):
        answer, body = asked(busy, path)
        assert answer.status == 404
        assert json.loads(body)["error"].endswith("/metrics, /readyz, /status.json, /v1/locate")
        assert asked(busy, path, "HEAD")[1] == b""


def test_the_document_has_no_secret_and_tells_new_samples_alone(busy: Daemon) -> None:
    told = document(busy)
    samples = told["history"]["samples"]
    assert [sample[0] for sample in samples] == list(range(len(samples)))
    last = samples[-1][0]
    assert document(busy, f"?since={last}")["history"]["samples"][0][0] == last
    assert document(busy, f"?since={last + 1000}")["history"]["samples"] == []
    assert asked(busy, "/status.json?since=x")[0].status == 400
    assert told["findings"][0]["check"] == "daemon"
    assert len(told["peers"]["peers"]) == 2
    assert TOKEN not in json.dumps(told)
