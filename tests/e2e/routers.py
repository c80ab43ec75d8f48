"""vllm-router as its users start it, and what other routers do, replayed by their documentation.

Each of these has a request's pictures encoded first, merges what the encoders say of them
(`ec_transfer_params`), and sends the request on to prefill, and then to decode.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from e2e.engines import ROOT
from e2e.servers import Server, free_port, installing
from support.processes import start

VERSION = "0.1.17"
Params = dict[str, dict]


def router_program() -> Path:
    """vllm-router from the package registry, in an environment of its own, installed once."""
    program = ROOT / ".venvs" / f"vllm-router-{VERSION}" / "bin" / "vllm-router"
    if not program.exists():
        home = program.parents[1]
        shutil.rmtree(home, ignore_errors=True)
        install = ["-m", "pip", "install", "-q", "--no-compile", f"vllm-router=={VERSION}"]
        installing([sys.executable, "-m", "venv", str(home)]).check_returncode()
        ran = installing([home / "bin/python", *install])
        if ran.returncode != 0:
            shutil.rmtree(home)
            said = f"vllm-router CANNOT BE HAD: {ran.stderr[-1000:]}"
            if os.environ.get("ECD_REQUIRE_VLLM"):
                pytest.fail(said)
            pytest.skip(said)
    return program


class VllmRouter(Server):
    """It asks its workers often whether they are well."""

    def __init__(self, log: Path, *flags: str) -> None:
        port = str(free_port())
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [str(router_program()), "--port", port, "--prometheus-port", str(free_port())]
        command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"]
        with log.open("wb") as out:
            self._process = start([*command, *flags], stdout=out, stderr=out)


def by_key(replies: list[Params]) -> Params:
    """Merge JSON objects by key; the last value of a key counts."""
    return {name: said for params in replies for name, said in params.items()}


def unless_they_differ(replies: list[Params]) -> Params:
    """Merge by key, and refuse the request where two encoders describe one item differently."""
    merged: Params = {}
    for params in replies:
        for name, said in params.items():
            assert merged.setdefault(name, said) == said, f"conflicting descriptors for {name}"
    return merged


@dataclass(frozen=True)
class Rules:
    """A router's. `groups`: the pictures of a sub-request, by each picture's URL and turn."""

    merge: Callable[[list[Params]], Params]
    groups: Callable[[Sequence[str], int], list[list[int]]]
    names_by_url: bool = False
    """Give each picture a uuid, a hash of its URL, before it is encoded."""
    names_for_decode: bool = False
    """Give the engine that decodes the names that the encoders had for the pictures."""
    rewrites: bool = False
    """Put metadata and names in place of the pictures if the encoders told all metadata."""
    tells_decode: bool = False
    """Hand `ec_transfer_params` to the engine that decodes, too."""


def one_each(urls: Sequence[str], encoders: int) -> list[list[int]]:
    return [[index] for index in range(len(urls))]


def each_url_once(urls: Sequence[str], encoders: int) -> list[list[int]]:
    return [[urls.index(url)] for url in dict.fromkeys(urls)]


def all_together(urls: Sequence[str], encoders: int) -> list[list[int]]:
    return [list(range(len(urls)))] if urls else []


def dealt(urls: Sequence[str], encoders: int) -> list[list[int]]:
    groups = [list(range(first, len(urls), encoders)) for first in range(encoders)]
    return [group for group in groups if group]


ROUTERS = {
    "vllm-router --epd-config": Rules(by_key, dealt, names_by_url=True, rewrites=True),
    "llm-d's sidecar": Rules(by_key, each_url_once, tells_decode=True),
    "llm-d's coordinator": Rules(unless_they_differ, one_each, names_for_decode=True),
    "Dynamo's encoder router": Rules(by_key, all_together, names_by_url=True),
}


@dataclass
class Served:
    """The answer, what the encoders said of the pictures, and what became of that."""

    status: int
    body: dict
    replies: list[Params]
    merged: Params


class Replay:
    """One router before its engines. Without `prefill` the engine that decodes prefills, too."""

    def __init__(
        self, rules: Rules, encoders: Sequence[Server], decode: Server, prefill: Server | None
    ) -> None:
        self._rules, self._encoders = rules, encoders
        self._decode, self._prefill = decode, prefill
        self._turns = itertools.cycle(encoders)

    def chat(self, content: list[dict], **options: object) -> Served:
        rules = self._rules
        shown = [dict(part) for part in content if part["type"] == "image_url"]
        urls = [part["image_url"]["url"] for part in shown]
        if rules.names_by_url:
            for part, url in zip(shown, urls, strict=True):
                part["uuid"] = sha256(url.encode()).hexdigest()
        groups = rules.groups(urls, len(self._encoders))
        asked = [([shown[index] for index in group], next(self._turns)) for group in groups]
        with ThreadPoolExecutor() as side:
            replies = list(side.map(lambda each: _encode(*each), asked))
        merged = rules.merge(replies)
        names = _names(urls, groups, replies)
        if rules.rewrites and all(merged[name]["metadata"] for name in names):
            shown = [_metadata(name, merged[name]["metadata"]) for name in names]
        sent = [*shown, *(part for part in content if part["type"] != "image_url")]
        handles = {"ec_transfer_params": merged} if merged else {}
        if self._prefill is None:
            return Served(*self._decode.chat(sent, **handles, **options), replies, merged)
        kv = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        once = {**options, "max_tokens": 1}
        status, body = self._prefill.chat(sent, **handles, **kv, **once)
        if status == 200:
            if rules.names_for_decode:
                for part, name in zip(shown, names, strict=True):
                    part["uuid"] = name
            told = handles if rules.tells_decode else {}
            status, body = self._decode.chat(sent, **told, **options)
        return Served(status, body, replies, merged)


def _encode(parts: list[dict], encoder: Server) -> Params:
    status, body = encoder.chat(parts, max_tokens=1)
    assert status == 200, f"{body}\n{encoder.text()[-3000:]}"
    return body["ec_transfer_params"]


def _names(urls: Sequence[str], groups: list[list[int]], replies: list[Params]) -> list[str]:
    """Each picture's, by its place in the sub-request that it was part of."""
    name_of = {
        urls[group[place]]: name
        for group, params in zip(groups, replies, strict=True)
        for name, said in params.items()
        for place in said["item_indices"]
    }
    return [name_of[url] for url in urls]


def _metadata(name: str, metadata: dict) -> dict:
    return {"type": "image_embeds", "image_embeds": metadata, "uuid": name}
