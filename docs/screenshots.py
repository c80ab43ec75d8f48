"""Takes the screenshots in docs/pictures: of the site, and of the page of a daemon at work.

    python docs/screenshots.py [--seconds 240]

Three daemons on this machine's loopback stand for nodes; a fourth is known and away. Clients put
and get what two models would, so the page's curves are as long as they worked.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image
from playwright.sync_api import Browser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from ecd_client import Client, EntryTooLarge
from support.browser import chromium, serving
from support.daemon import Daemon, close_all

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
SITE = {"home": "", "settings": "configuration/", "benchmark": "benchmarks/load/"}
"""Pages of the site, by the names of their pictures."""
MIB = 1 << 20
NODES = ("127.0.90.1:9465", "127.0.90.2:9465", "127.0.90.3:9465")
AWAY = "127.0.90.4:9465"
QWEN = "Qwen/Qwen2.5-VL-7B-Instruct@bfloat16"
SPACES = {
    QWEN: (0.55, 9 * MIB, 0.24),
    "OpenGVLab/InternVL3-8B@bfloat16": (0.3, 5 * MIB, 0.16),
    "tenant-b/Qwen2.5-VL-7B-Instruct": (0.15, 3 * MIB, 0.09),
}
"""Each namespace's share of the lookups, its largest entry, and the seconds to encode that."""
LOOKUPS_PER_S = 25


@contextmanager
def nodes(directory: Path, pool: str = "768MiB") -> Iterator[list[Daemon]]:
    """Three daemons that know each other; the first, which is shown, has a disk tier."""
    daemons = []
    for number, node in enumerate(NODES):
        name = f"node-{number + 1}"
        settings = {
            "ECD_NAME": name,
            "ECD_PEER_ADDRESS": node,
            "ECD_PEER_TOKEN": "sixteen letters or more",
            "ECD_DIRECTORY": "static",
            "ECD_PEERS": ",".join(each for each in (*NODES, AWAY) if each != node),
            "ECD_ENGINE_PORTS": f"{31000 + 32 * number}-{31031 + 32 * number}",
            "ECD_WARM_RESTART": "false",
        }
        if not number:
            (directory / "disk").mkdir(exist_ok=True)
            settings |= {"ECD_DISK_POOL_BYTES": "2GiB", "ECD_DISK_DIR": str(directory / "disk")}
        daemons.append(Daemon(directory, pool if not number else "256MiB", **settings))
        daemons[-1].shm = Path("/dev/shm") / f"ecd-{name}"
    try:
        yield [daemon.start() for daemon in daemons]
    finally:
        close_all(daemons)


def work(daemons: list[Daemon], half_s: float, has_ended: threading.Event) -> None:
    """Look up what engines would, put what is missing, and ask for something that cannot be.

    After `half_s` fewer pictures are popular.
    """
    rng, begun_s = random.Random(1), time.monotonic()
    with ExitStack() as clients:
        here = [
            clients.enter_context(Client(daemons[0].address, name=name))
            for name in ("vllm prefill", "vllm encode", "vllm decode")
        ]
        for number, there in enumerate(daemons[1:]):
            client = clients.enter_context(Client(there.address, namespace=QWEN))
            for key in range(12):
                put(client, QWEN, f"remote {number} {key}", 2 * MIB, 0.2)
        try:
            put(here[1], QWEN, "a long video", 800 * MIB, 30.0)
        except EntryTooLarge:
            pass
        else:
            sys.exit("the pool is too large to refuse anything")
        while not has_ended.is_set():
            client, due_s = rng.choice(here), time.monotonic() + 1 / LOOKUPS_PER_S
            [space] = rng.choices(list(SPACES), [share for share, *_ in SPACES.values()])
            _, nbytes, cost_s = SPACES[space]
            popular = int(rng.paretovariate(0.7 if time.monotonic() < begun_s + half_s else 0.9))
            look_up(client, space, f"image {min(popular, 400)}", nbytes, cost_s)
            if rng.random() < 0.02:
                remote = f"remote {rng.randrange(2)} {rng.randrange(12)}"
                look_up(client, QWEN, remote, nbytes, cost_s, 0.5)
            time.sleep(max(0.0, due_s - time.monotonic()))


def look_up(
    client: Client, space: str, key: str, nbytes: int, cost_s: float, timeout: float = 0.0
) -> None:
    """Get an entry; put it where it is missing, its size and cost by its name."""
    item = client.get(key, timeout, namespace=space)
    if item is not None:
        item.close()
        return
    share = random.Random(key).uniform(0.2, 1.0)
    put(client, space, key, int(nbytes * share), cost_s * share)


def put(client: Client, space: str, key: str, nbytes: int, cost_s: float) -> None:
    client.put_bytes(key, bytes(nbytes), "uint8", (nbytes,), cost=cost_s, namespace=space)


def save(picture: bytes, path: Path) -> None:
    """Write a screenshot with 64 colours, which text and flat areas do not miss."""
    image = Image.open(BytesIO(picture)).convert("RGB").quantize(64)
    image.save(path, optimize=True)
    print(path)


def shoot_site(browser: Browser, output: Path) -> None:
    """Three pages of the site as a reader sees them."""
    with tempfile.TemporaryDirectory() as built:
        build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", built]
        subprocess.run(build, cwd=DOCS.parent, check=True)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        with serving(Path(built)) as address:
            for name, path in SITE.items():
                page.goto(f"{address}/{path}")
                save(page.screenshot(), output / f"site-{name}.png")
        page.close()


def shoot_status_page(browser: Browser, url: str, output: Path) -> None:
    """The page there, in both of its modes."""
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
        page.goto(url)
        page.wait_for_selector("main:not([hidden])")
        page.wait_for_timeout(4500)  # the rates are of more than one look
        save(page.screenshot(full_page=True), output / f"status-page-{scheme}.png")
        page.close()


def main(
    seconds: Annotated[float, typer.Option(help="How long the clients have worked.")] = 240.0,
    output: Annotated[Path, typer.Option(help="The pictures' directory.")] = PICTURES,
) -> None:
    with (
        chromium() as browser,
        tempfile.TemporaryDirectory() as place,
        nodes(Path(place)) as daemons,
    ):
        shoot_site(browser, output)
        has_ended = threading.Event()
        working = threading.Thread(target=work, args=(daemons, seconds / 2, has_ended))
        working.start()
        try:
            time.sleep(seconds)
            shoot_status_page(browser, daemons[0].metrics_url().removesuffix("metrics"), output)
        finally:
            has_ended.set()
            working.join()


if __name__ == "__main__":
    typer.run(main)
