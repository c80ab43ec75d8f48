"""An API user who wants to end engines, or to have others get wrong answers, does neither.

`attacker.py` draws chat completions. Each goes to one of three engines that share a daemon, while
bystanders use them. An engine without ecd says what is right.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import urllib.error
import urllib.request
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from e2e.attacker import ENDS_VLLM, Attacker
from e2e.chats import (
    ANY,
    FAILS,
    LONG,
    SAME_OR_FAILS,
    Content,
    Raw,
    Request,
    bare,
    chat,
    content_of,
    described,
    named,
    packed,
    picture,
    shown,
    taken,
    text,
    without,
    written,
)
from e2e.engines import output_of
from e2e.servers import Server, api_server, describes
from e2e.shared import PLAIN, Engines
from support.daemon import Daemon
from support.waiting import HANG_S, eventually, value_of

FEW = 300
REQUESTS = int(os.environ.get("ECD_REQUESTS", FEW))
SEED = os.environ.get("ECD_REQUESTS_SEED") or ("0" if REQUESTS == FEW else secrets.token_hex(4))
"""The few requests are the same in every run; more are drawn by lot."""
LEFT_OUT = [ENDS_VLLM, *os.environ.get("ECD_REQUESTS_WITHOUT", "").split(",")]
"""Classes of requests, by the names that a failure is told with (`Attacker`)."""
AT_ONCE = 12
MOST_FAILURES = 5
MOST_TRIES = 30
"""Of one failing request, to make it shorter."""
CLIPS, OTHERS = 5, 2
"""Videos, and how many are others'."""
MIDDLEWARE = ["--middleware", "ecd_client.vllm.ReuseMiddleware"]
ENGINES: dict[str, tuple[str | None, list[str]]] = {
    "plain": (None, ["--enable-mm-embeds"]),
    "both": ("ec_both", MIDDLEWARE),
    "consumer": ("ec_consumer", ["--disable-log-stats"]),
    "encoder": ("ec_producer", MIDDLEWARE),
}
"""Their roles and flags. vLLM takes embeddings, as --enable-mm-embeds says, of all consumers."""
LIMITS = ["--max-model-len", "512", "--limit-mm-per-prompt", '{"image": 4, "video": 1}']
LIMITS += ["--block-size", "32"]
"""Blocks of the KV cache are as small as a CPU allows: requests use what others computed."""
ATTACKED = "both", "consumer", "encoder"
COMPARED = "both", "consumer"
"""Engines that answer as a plain one does; one that only encodes has nothing to say."""
READY = "ecd: pictures and videos that are stored are not preprocessed"

pytestmark = pytest.mark.timeout(600 + REQUESTS)


# -- answers ---------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """An answer's status, and its text. Status 0: it did not come whole."""

    status: int
    text: str


def send(server: Server, body: bytes, asked: Request, **headers: str) -> Answer:
    """Send a body as the request is sent."""
    about = {"Content-Type": "application/json", **headers, **asked.headers}
    request = urllib.request.Request(f"{server.url}{asked.path}", body, about)
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as reply:
            return Answer(reply.status, reply.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException) as error:
        return Answer(0, repr(error))


class Said(NamedTuple):
    """What an answer says: its choices by their index, or why there are none."""

    choices: dict[int, Any] | None
    failure: str = ""
    is_clean: bool = True


def read(answer: Answer) -> Said:
    """A failure is clean if it is told as JSON."""
    try:
        if answer.text.startswith("data: "):
            return _read_stream(answer.text)
        body = json.loads(answer.text)
        if answer.status == 200:
            return Said({each["index"]: _choice(each, each["message"]) for each in body["choices"]})
        is_told = body.keys() & {"error", "detail"}
        return Said(None, answer.text, answer.status >= 400 and bool(is_told))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Said(None, answer.text, is_clean=False)


def _read_stream(said: str) -> Said:
    *lines, last = [line.removeprefix("data: ") for line in said.split("\n\n") if line]
    choices: dict[int, Any] = {}
    for chunk in map(json.loads, lines):
        if "error" in chunk:
            return Said(None, said, last == "[DONE]")
        for each in chunk["choices"]:
            content, end, tokens = _choice(each, each["delta"])
            before = choices.get(each["index"], ("", None, []))
            choices[each["index"]] = before[0] + content, end or before[1], [*before[2], *tokens]
    return Said(choices, is_clean=last == "[DONE]")


def _choice(choice: dict, said: dict) -> tuple[str, Any, list]:
    tokens = (choice.get("logprobs") or {}).get("content") or []
    chosen = [(token["token"], pytest.approx(token["logprob"], abs=2e-3)) for token in tokens]
    return said.get("content") or "", choice["finish_reason"], chosen


def fault(right: str, answer: Answer, plain: Answer | None) -> str | None:
    """Why an answer is wrong. None: it is right. `plain` is a plain engine's, if it is compared."""
    said = read(answer)
    if not said.is_clean:
        return f"no whole answer: {answer.status} {answer.text[-500:]}"
    if right == FAILS:
        return None if said.choices is None else f"an answer, and it had to fail: {said.choices}"
    if right == ANY or plain is None:
        return None
    expected = read(plain)
    if said.choices is None:
        is_right = expected.choices is None or right == SAME_OR_FAILS
        return None if is_right else f"it fails, and a plain engine's does not: {answer}"
    if plain.status == 500:  # an error within vLLM, which says nothing of the request
        return None
    return None if said == expected else f"{said.choices}, and a plain engine says {expected}"


# -- engines ---------------------------------------------------------------------------------------


class Room:
    """Engines that share a daemon, and one without ecd."""

    def __init__(self, daemon: Daemon, directory: Path, engines: Engines, version: str) -> None:
        self.daemon = daemon
        self._directory, self._engines, self._version = directory, engines, version
        self._starts = Counter[str]()
        self.side = ThreadPoolExecutor(2 * AT_ONCE)
        self.servers: dict[str, Server] = {}

    def start(self, *names: str) -> None:
        """Start engines, in place of those that were there."""
        for name in names:
            if name in self.servers:
                self.servers[name].kill()
            self._starts[name] += 1
            role, flags = ENGINES[name]
            log = self._directory / f"{name}-{self._starts[name]}.log"
            extra = {} if role is None else {"ecd_address": self.daemon.address}
            model = self._engines.model(self._version)
            self.servers[name] = api_server(
                *(self._version, log, model, role, [*PLAIN, *flags, *LIMITS]), **extra
            )
        for name in names:
            server = self.servers[name].wait_ready()
            if ENGINES[name][1] == MIDDLEWARE:
                eventually(lambda server=server: READY in server.text(), f"{name} reuses pictures")

    def clips(self) -> list[Path]:
        """Videos as files."""
        output_of(self._version, "clips.py", str(self._directory), str(CLIPS), "2.0")
        return sorted(self._directory.glob("*.mp4"))

    def ask(self, name: str, tree: Any) -> Answer:
        request = Request(tree, name)
        return send(self.servers[name], request.body, request)

    def close(self) -> None:
        self.side.shutdown()
        with ThreadPoolExecutor() as side:
            list(side.map(Server.close, self.servers.values()))


class Watch:
    """Sends requests beside bystanders', and says what is wrong with the answers to both."""

    def __init__(self, room: Room, bystanders: Sequence[Content]) -> None:
        """`bystanders` are the pictures and videos of those who must not notice."""
        self.room, self.counts = room, Counter[str]()
        asked = [chat(text("what is what?")), *(chat(shown(b), text()) for b in bystanders)]
        self._ordinary = [(each, read(room.ask("plain", each))) for each in asked]
        assert all(right.choices for _, right in self._ordinary), self._ordinary
        self._turn, self._numbers = 0, count()

    def faults(self, requests: Sequence[Request]) -> list[str]:
        """Send requests at one time; returns what is wrong with their answers and others'.

        Engines that do not serve others any more are started again.
        """
        room, side = self.room, self.room.side
        plains = self._plain_answers(requests)
        asked = [(r, plain) for r, plain in zip(requests, plains, strict=True) if plain != ENDS]
        judged = [side.submit(self._judged, request, plain) for request, plain in asked]
        meanwhile = [side.submit(self._bystander, name) for name in COMPARED]
        faults = [*filter(None, (each.result() for each in judged))]
        faults += filter(None, (each.result() for each in meanwhile))
        for request, _ in asked:
            if request.then is not None:
                faults += self.faults([request.then])
        for name in ATTACKED:
            if why := self._bystander(name):
                faults.append(f"{why}\n{room.servers[name].text()[-2000:]}")
                room.start(name)
        return faults

    def explained(self, requests: Sequence[Request]) -> list[str]:
        """Send requests at one time; returns the faults, each with the request that makes it."""
        faults = self.faults(requests)
        if not faults:
            return []
        alone = [(request, found[0]) for request in requests if (found := self.faults([request]))]
        told = [f"{why}\n{self._shortened(request)}" for request, why in alone]
        together = [*faults, "by these together, or by what came before:", *map(str, requests)]
        return told or ["\n".join(together)]

    def _shortened(self, request: Request) -> Request:
        """Leave out what can be left out, and it still fails in the same way each time."""
        place, options = 0, request.tree.keys() - {"messages"}
        for _ in range(0 if request.then else MOST_TRIES):  # what it did lasts
            tree = without(request.tree, place)
            if tree is None:
                break
            shorter = replace(request, tree=tree)
            if options <= tree.keys() and self.faults([shorter]):
                request = shorter
            else:
                place += 1
        return request

    def _judged(self, request: Request, plain: Answer | None) -> str | None:
        """Send a request; returns what is wrong with its answer."""

        def wrong(answer: Answer) -> str | None:
            self.counts[f"{request.at}: {answer.status}"] += 1
            is_served = answer.status == 200 and request.at in COMPARED
            for kind in ("image", "video"):
                brings = f'"{kind}_grid'.encode() in request.body
                self.counts[f"{kind} metadata served"] += is_served and brings
            return fault(request.right, answer, plain if request.at in COMPARED else None)

        why = self._asked(request.at, request.body, request, wrong)
        return None if why is None else f"{request.at}: {why}"

    def _asked(
        self,
        name: str,
        body: bytes,
        request: Request,
        wrong: Callable[[Answer], str | None],
    ) -> str | None:
        """Ask with this body; returns what is wrong with the answer, or with the next one.

        vLLM fails a request with a picture of one that it refused before, but only once: its API
        server believes that the engine has the picture, hears that it has not, and sends it again.
        """
        server, number = self.room.servers[name], next(self._numbers)
        answer = send(server, body, request, **{"X-Request-Id": f"asked-{number}"})
        why = wrong(answer)
        may_drift = why is not None and answer.status in (200, 500)  # a stream fails with 200
        if may_drift and re.search(rf"chatcmpl-asked-{number}-.*cache drift", server.text()):
            self.counts["vLLM's cache drifts"] += 1
            why = wrong(send(server, body, request))
        return why

    def _plain_answers(self, requests: Sequence[Request]) -> list[Answer | None]:
        """What a plain engine says to each; ENDS where it does not survive."""

        def ask(request: Request) -> Answer | None:
            if request.plainly is None:
                return None
            told: list[Answer] = []

            def failure(answer: Answer) -> str | None:
                told.append(answer)
                return "it fails" if read(answer).choices is None else None

            self._asked("plain", request.plainly, request, failure)
            return told[-1]

        answers = list(self.room.side.map(ask, requests))
        if self._bystander("plain") is None:
            return answers
        self.room.start("plain")
        for at, request in enumerate(requests):
            answers[at] = ask(request)
            if self._bystander("plain"):
                answers[at] = ENDS
                self.counts["vLLM's own ends"] += 1
                print(f"a plain engine ends: {request}")
                self.room.start("plain")
        return answers

    def _bystander(self, name: str) -> str | None:
        """Why an ordinary request fails at this engine. None: it is served."""
        self._turn += 1
        tree, right = self._ordinary[self._turn % len(self._ordinary)]
        self.counts["bystanders"] += name in ATTACKED

        def wrong(answer: Answer) -> str | None:
            said = read(answer)
            if said == right or (name == "encoder" and answer.status == 200):
                return None
            return f"a bystander of {name}: {answer.status}, {said} and not {right}"

        request = Request(tree, name)
        return self._asked(name, request.body, request, wrong)


ENDS = Answer(-1, "it ends")


@pytest.fixture(scope="module")
def room(
    version: str, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Room]:
    directory = tmp_path_factory.mktemp("attacked")
    daemon = Daemon(directory, "4MiB").start()
    room = Room(daemon, directory, engines, version)
    try:
        room.start(*ENGINES)
        yield room
    finally:
        room.close()
        daemon.close()


def told(room: Room, at: str, content: Content, **more: Any) -> Content:
    """The content under the name that this engine says it has, and with its grid.

    The first answer says none where the engine does not see its put within SEEN_WITHIN_S.
    """

    def said_of_it() -> dict[str, Any] | None:
        answer = room.ask(at, chat({**shown(content), **more}, max_tokens=1))
        body = json.loads(answer.text)
        return body["ec_transfer_params"] if describes(body) else None

    [(name, said)] = value_of(said_of_it, f"{at} describes {content.name}").items()
    return content._replace(name=name, grid=said["metadata"][f"{content.kind}_grid_thw"])


@pytest.fixture(scope="module")
def clips(room: Room) -> list[Content]:
    """The attacker's own videos, and others', which have the names of their bytes."""
    urls = [
        f"data:video/mp4;base64,{b64encode(clip.read_bytes()).decode()}" for clip in room.clips()
    ]
    clips = [Content(f"clip-{at}", url, (), "video") for at, url in enumerate(urls)]
    own = [told(room, "encoder", clip, uuid=clip.name) for clip in clips[OTHERS:]]
    return [*(told(room, "both", clip) for clip in clips[:OTHERS]), *own]


class Victims:
    """Pictures of others. An attacker knows their names, which are digests.

    Those `shown` are asked about all the time, those `unseen` when an attacker was there first.
    """

    def __init__(self, room: Room, numbers: range, shown: int = 0) -> None:
        contents = [content_of(f"a picture of others {number}") for number in numbers]
        known = list(room.side.map(lambda content: told(room, "encoder", content), contents))
        room.daemon.evict_all()
        self.shown, self.unseen = known[:shown], known[shown:]


@pytest.fixture(scope="module")
def victims(room: Room) -> Victims:
    return Victims(room, range(16 + REQUESTS // 40), shown=8)


@pytest.fixture(scope="module")
def watch(room: Room, victims: Victims, clips: list[Content]) -> Watch:
    return Watch(room, [*victims.shown, *clips[:OTHERS]])


def test_what_an_attacker_sends_fails_alone_or_is_answered_rightly(
    watch: Watch, victims: Victims, clips: list[Content]
) -> None:
    print(f"{REQUESTS} requests, ECD_REQUESTS_SEED={SEED}")
    shown = [*victims.shown, *clips[:OTHERS]]
    engines = [*COMPARED, *ATTACKED]
    attacker = Attacker(SEED, engines, clips[OTHERS:], shown, victims.unseen, LEFT_OUT)
    requests, faults, sent = islice(attacker, REQUESTS), [], 0
    while len(faults) < MOST_FAILURES and (batch := list(islice(requests, AT_ONCE))):
        sent += len(batch)
        faults += [f"among the first {sent}: {told}" for told in watch.explained(batch)]
    print(f"{sent} requests:", dict(sorted(watch.counts.items())))
    for kind in ("image", "video"):
        served = watch.counts[f"{kind} metadata served"]
        assert served, "nothing was asked that only ecd can answer"
    assert not faults, f"after {sent}, ECD_REQUESTS_SEED={SEED}\n" + "\n\n".join(faults)


GRID = [1, 16, 24]
EXACT = [
    *([1, Raw("16.0"), 24], [1.0, 16.0, 24.0], [1, Raw("1.6e1"), 24], [1, 16, Raw("240e-1")]),
    [True, 16, 24],
]
"""Other spellings of the grid, which are equal to it in Python."""


def of_grid(number: int) -> Content:
    """A new name for each number, with a picture of GRID."""
    names = (f"{number}-{more}" for more in range(100))
    return next(c for c in map(content_of, names) if list(c.grid) == GRID)


def kept(content: Content, at: str = "both", **options: Any) -> list[Request]:
    """The owner of a name has its picture stored."""
    return [Request(chat(named(content), text(), **options), at)]


def asks(part: Any, right: str = SAME_OR_FAILS, *said: str, **options: Any) -> list[Request]:
    return [Request(chat(part, text(*said), **options), at, right) for at in COMPARED]


def metadata(grid: Any, number: int) -> list[list[Request]]:
    """A name's metadata, which are not quite those of the entry."""
    content = of_grid(number)
    return [kept(content), asks(described(content, grid))]


def recomputed(content: Content, grid: list[int]) -> list[list[Request]]:
    """A grid of as many patches as the content's, whose tokens were computed already."""
    parts = described(content), described(content, grid)
    rightly, wrongly = (asks(part, SAME_OR_FAILS, LONG) for part in parts)
    return [kept(content), rightly, wrongly, rightly]


def salted(content: Content, part_of: Callable[[Content], Any]) -> list[list[Request]]:
    """One tenant has a content stored; another knows its name, and does not have it."""
    mine, others = {"cache_salt": "tenant A"}, {"cache_salt": "tenant B"}
    stolen = [asks(part_of(content), FAILS, **salt) for salt in (others, {})]
    return [kept(content, "encoder", **mine), *stolen, asks(part_of(content), **mine)]


def rated(field: str) -> list[list[Request]]:
    """A video that nobody has stored, by metadata of which one says when its frames were."""
    said = {"video_grid_thw": [2, 8, 8], field: packed(torch.tensor(1.0))}
    return [
        asks({"type": "video_embeds", "uuid": f"nobody's {field}", "video_embeds": said}, FAILS)
    ]


SEEN = of_grid(300).url
NO_PICTURE = ("type", "image_url"), ("image_url", {"url": "data:,"})
NAMED: dict[str, list[list[Request]]] = {
    **{f"grid {written(grid)}": metadata(grid, at) for at, grid in enumerate(EXACT)},
    "grid of a tensor of floats": metadata(packed(torch.tensor(GRID, dtype=torch.float32)), 100),
    "grid of a tensor of int32": metadata(packed(torch.tensor(GRID, dtype=torch.int32)), 101),
    "another grid, of computed tokens": recomputed(of_grid(102), [1, 8, 48]),
    "other tenant's name": salted(of_grid(200), described),
    "other tenant's name and no picture": salted(
        of_grid(201), lambda each: bare(each, *NO_PICTURE)
    ),
    **{f"video with {field}": rated(field) for field in ("second_per_grid_ts", "timestamps")},
    "URL as text": [
        [Request(chat(part), "both")]
        for part in (picture(SEEN), {"type": "image_url", "image_url": SEEN})
    ],
}
"""Requests that have ended engines, or were answered wrong, in their order; each list at once."""


@pytest.mark.parametrize("name", NAMED)
def test_requests_that_did_harm_do_none(name: str, watch: Watch) -> None:
    faults = [told for requests in NAMED[name] for told in watch.faults(requests)]
    assert not faults, "\n\n".join(faults)


def test_what_is_said_of_a_clip_harms_nobody(watch: Watch, clips: list[Content]) -> None:
    name = count()
    frames, height, width = clips[0].grid

    def new() -> Content:
        return clips[-1]._replace(name=f"a new name {next(name)}")

    floats, other = [float(side) for side in clips[0].grid], [frames // 2, height * 2, width]
    equal, tenants = new(), new()
    rows = [kept(equal), asks(described(equal, floats))]
    rows += [*recomputed(new(), other), *recomputed(clips[0], other)]
    rows += salted(tenants, described)
    faults = [told for requests in rows for told in watch.faults(requests)]
    assert not faults, "\n\n".join(faults)


def test_a_clients_tensor_is_not_taken_for_the_picture_of_its_name(
    watch: Watch, room: Room
) -> None:
    """The name is the digest of a picture that comes later, to the same engine or another."""
    unseen = Victims(room, range(10_000, 10_004)).unseen
    requests = [
        taken(victim, 3.0, packed(torch.tensor(victim.grid)) if is_tensor else [*victim.grid], at)
        for victim, (at, is_tensor) in zip(unseen, product(COMPARED, (False, True)), strict=True)
    ]
    faults = [told for request in requests for told in watch.faults([request])]
    assert not faults, "\n\n".join(faults)
