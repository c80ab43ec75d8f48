"""Draws chat completions of an attacker from a seed."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count
from random import Random
from typing import Any

import torch

from e2e.chats import (
    ANY,
    ODD,
    OWN,
    SAME,
    SAME_OR_FAILS,
    WIDTH,
    Content,
    Kept,
    Pairs,
    Raw,
    Request,
    bare,
    chat,
    content_of,
    described,
    named,
    packed,
    picture,
    places,
    shown,
    taken,
    tensor,
    text,
    uploaded,
    written,
)

ENDS_VLLM = "ends vLLM"
"""The class of requests that end vLLM with ecd and without: deep options that it passes on."""


def spellings(number: int) -> list[Raw]:
    """JSON for a number, then for what is another one or none."""
    equal = (
        f"{number}.0",
        f"{number / 10!r}e1",
        f"{number}0e-1",
        f"{number}E+00",
        f"{number}.{0:030}1",
    )
    near = "-0", "0", f"-{number}", f"{number + 1}", f"{number}.5", f'"{number}"', f"[{number}]"
    far = "true", "false", "null", "{}", "1e400", "-1e400", "NaN", "Infinity", f"{1 << 31}"
    no_json = f"0x{number:x}", f"0{number}", f"+{number}", "1_6", "1e", ".5", "\uff11\uff16"
    return [*map(Raw, (*equal, *near, *far, *no_json, "1" * 400, "1" * 5000, f"{1 << 63}"))]


DTYPES = [
    *(torch.int64, torch.int32, torch.uint8, torch.int8, torch.float32, torch.float64),
    *(torch.bfloat16, torch.bool, torch.complex64),
]
EQUAL = 5
"""The first spellings, of which Python makes a number that is equal."""
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 16.0, 1 << 63, -(1 << 64), [], {}, [[]], "", " ", "a", "\0"),
    *("16", "\ud800", "\udfff\ud800", "\u202e", "e\u0301" * 50, "<|image_pad|>", "x" * 70_000),
    *map(Raw, ("1e400", "-0", "NaN", "-Infinity", "1.6e1", "1" * 400, "1" * 5000, '"\\ud83d"')),
    *(Raw("[" * 50 + "]" * 50), Raw('{"a":' * 50 + "1" + "}" * 50), Pairs([("a", 1), ("a", 2)])),
]
DEEP = [Raw("[" * depth + "]" * depth) for depth in (500, 100_000)]
DEEP += [Raw('{"a":' * 900 + "1" + "}" * 900)]
PASSED_ON = "ec_transfer_params", "kv_transfer_params", "vllm_xargs"
"""Options that vLLM hands to its engine as they are, which ends of deep ones."""
NODES = ["127.0.0.1:1", "10.0.0.1:9465", "[::1]:80", "", "\0", "a" * 300, 5, None, ["::1:1"], {}]
EXTENTS = [
    *([0, 0, 4096], [0, 0, 1 << 62], [1, 1, 1], [-1, 0, 0], [0.0, 0, 1], ["0"], [], None, {}, 7),
    [0, 1 << 63, 1],
]
NO_URLS = [
    *("", "data:,", "data:image/png;base64,", "data:image/png;base64,AAAA", "data:text/html,<b>"),
    *("DATA:image/png;base64,!!", "data:", "file:///etc/passwd", "http://127.0.0.1:1/a.png", "\0"),
    *("ftp://a", "http://[::1", "x"),
]
TEXTS = ["what is it?", "what is in this picture?", "and what is in the other?"]
ODD_TEXTS = [
    *("", "\0", "\ud800", "<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>" * 96),
    *("a" * 3000, "<|im_end|>", "\u202e\U0001f600", "<##IMAGE##>", None, 5),
]
TAME: dict[str, list[Any]] = {
    "stream": [True],
    "n": [2],
    "cache_salt": ["tenant A", "tenant B"],
    "max_tokens": [1, 2, 5, Raw("2.0"), Raw("0.2e1")],
    "top_logprobs": [1],
    "mm_processor_kwargs": [{}, {"max_pixels": 50176}],
    "logprobs": [False],
}
"""Options of ordinary requests."""
OPTIONS: dict[str, list[Any]] = {
    "n": [1, 2, 3, 0, -1],
    "logprobs": [True, False, None, 1, "true"],
    "top_logprobs": [0, 1, 3, 500, -1],
    "prompt_logprobs": [0, 1, -1, -2],
    "max_tokens": [1, 2, 5, 0, -1, 100_000],
    "max_completion_tokens": [1, 4, 0],
    "stream": [True, False, None, "yes", 1],
    "cache_salt": ["", " ", "\0", "\ud800", "x" * 1024, "x" * 1025, None, 5, ["a"]],
    "mm_processor_kwargs": [{"min_pixels": -1}, {"size": {}}, {"a": [1]}, None, [], "x"],
    "media_io_kwargs": [{}, {"image": {"image_mode": "L"}}, {"image": {"image_mode": "x"}}, []],
    "kv_transfer_params": [{}, {"do_remote_prefill": True}, None, []],
    "vllm_xargs": [{}, {"ec_transfer_params": "x"}, {"a": 1}, {"ec_transfer_params": [1, 2]}],
    "truncate_prompt_tokens": [1, 10, -1, 100_000, -2],
    "chat_template": ["{{ messages }}", "x", "{{", ""],
    "chat_template_kwargs": [{}, {"messages": []}, {"tools": 5}, []],
    "add_generation_prompt": [False, True, None],
    "continue_final_message": [True],
    "echo": [True],
    "stop": ["a", ["a", "b"], [], "", 5],
    "stop_token_ids": [[1], [-1], [1 << 40], "x"],
    "priority": [0, 1, -1],
    "seed": [0, -1, 1 << 63],
    "user": ["a", None],
    "model": [None, "tiny", "other", "", 5, "\ud800"],
    "stream_options": [{"include_usage": True}, {}, None],
    "add_special_tokens": [True],
    "return_token_ids": [True],
    "logit_bias": [{}, {"1": 5}, {"x": 1}, {"99999": 1}],
    "unheard_of": [1, {}, "x"],
}
HEADERS = "text/json", "application/json; charset=utf-16", "application/x+json", "text/plain", ""
SPOILT: list[Callable[[bytes], bytes]] = [
    lambda body: b"\xef\xbb\xbf" + body,
    lambda body: body.decode("utf-8", "replace").encode("utf-16"),
    lambda body: body.decode("utf-8", "replace").encode("utf-32-le"),
    lambda body: body[:-1],
    lambda body: body + b"}",
    lambda body: b" \n\t" * 1000 + body + b"\n" * 1000,
    lambda body: body.replace(b"what", b"\xff\xfe\xc0\x80"),
    lambda body: body.replace(b"what", b"a\nb\0c"),
    lambda body: body.replace(b'"messages"', b'"messages": [], "messages"'),
    lambda body: body.replace(b'"image_url"', b'"image\\u005furl"'),
    lambda body: b"[" + body + b"]",
    lambda body: b"",
]


class Attacker:
    """Draws requests. It knows the names of others' pictures and videos."""

    def __init__(
        self,
        seed: object,
        engines: Sequence[str],
        clips: Sequence[Content],
        shown: Sequence[Content],
        unseen: Sequence[Content],
        left_out: Collection[str] = (),
    ) -> None:
        """`clips` are videos of its own.

        Others' pictures and videos are `shown` all the time, or `unseen` by engines until one is
        attacked. `left_out` has names of classes of requests.
        """
        self._chance, self._numbers = Random(f"{seed}"), count()
        self._engines, self._left_out = engines, set(left_out)
        self._own, self._shown, self._unseen = [*OWN, *clips], shown, list(unseen)
        self._classes: set[str] = set()
        self._right = SAME

    def __iter__(self) -> Iterator[Request]:
        while True:
            self._classes, self._right = set(), SAME
            request = self._request()
            if not request.classes & self._left_out:
                yield request

    def _pick(self, values: Any) -> Any:
        return values[self._chance.randrange(len(values))]

    def _often(self, share: float) -> bool:
        return self._chance.random() < share

    def _is(self, kind: str, right: str = SAME) -> None:
        """Note a class of the request, and what is right for it at best."""
        self._classes.add(kind)
        from_the_strictest = SAME, SAME_OR_FAILS, ANY
        self._right = max(self._right, right, key=from_the_strictest.index)

    # -- whole requests ------------------------------------------------------------------------

    def _request(self) -> Request:
        """An ordinary request but for one thing, or now and then two."""
        if self._often(0.02) and self._unseen:
            victim = self._unseen.pop()
            forms = [list(victim.grid), packed(torch.tensor(victim.grid))]
            value, at = self._pick([3.0, 0.0, -7.5]), self._pick(["both", "consumer"])
            return taken(victim, value, self._pick(forms), at)
        at = self._pick(self._engines)
        # vLLM takes no pictures beside metadata, and an engine that only encodes no metadata.
        is_bare = at != "encoder" and self._often(0.5)
        kinds = [self._described] if is_bare else [self._seen, self._named, self._named]
        parts = [self._pick(kinds)() for _ in range(self._pick([1, 1, 1, 2, 3]))]
        tree = chat(*parts, text(self._pick(TEXTS)))
        for name, values in TAME.items():
            if self._often(0.08):
                self._is(name)
                tree[name] = self._pick(values)
        request = Request(tree, at, classes=self._classes, only_ascii=self._often(0.9))
        if self._often(0.03):
            self._is("invocations")
            request.path = "/invocations"
        oddities = self._part, self._option, self._message, self._mutate, self._spoil
        chosen = self._chance.choices(range(5), (12, 4, 1, 3, 2), k=self._pick([0, 1, 1, 1, 2]))
        for number in sorted(chosen):  # a mutation leaves no form to go by
            oddities[number](request)
        request.right = self._right
        return request

    def _part(self, request: Request) -> None:
        """Put an odd part in the place of all, of the first, or beside others."""
        often = [self._misdescribed, self._misdescribed, self._stranger]
        rare = [self._unknown, self._uploaded, self._torn, self._no_picture, self._text]
        kind = self._pick([*often, self._left_out_media, self._other_form, *rare[:3], rare])
        part = (kind if callable(kind) else self._pick(kind))()
        first, end = self._pick([*[(0, -1)] * 4, (0, 1), (0, 0), (-1, None)])
        request.tree["messages"][-1]["content"][first:end] = [part]

    def _message(self, request: Request) -> None:
        self._is("messages")
        messages = request.tree["messages"]
        role = self._pick(["system", "assistant", "tool", "developer", "", "\ud800", 5])
        content = self._pick([[self._text()], "a", None, messages[0]["content"]])
        messages.insert(0, {"role": role, "content": content})

    def _spoil(self, request: Request) -> None:
        self._is("bytes")
        if self._often(0.3):
            request.headers = {"Content-Type": self._pick(HEADERS)}
        else:
            request.spoil = self._pick(SPOILT)

    def _mutate(self, request: Request) -> None:
        """Put something else into one place, or take it out."""
        self._is("mutation")
        owner, at = self._pick([*places(request.tree)])
        if at == "temperature":
            self._right = ANY  # what is drawn by lot is never the same
        value = self._pick(VALUES)
        if self._often(0.1):
            value = self._pick(DEEP)
            passed_on = {name: v for name, v in request.tree.items() if name in PASSED_ON}
            if at in PASSED_ON or any(owner is each for each, _ in places(passed_on)):
                self._is(ENDS_VLLM)
        match self._chance.randrange(4):
            case 0 if isinstance(owner, dict):
                del owner[at]
            case 1 if isinstance(owner, dict) and not _has_kept(owner[at]):
                twice = f"{written(value)}, {written(at)}: {written(owner[at])}"
                owner[at] = Raw(twice)
            case 2:
                owner[at] = [owner[at]]
            case _:
                owner[at] = value

    # -- options -------------------------------------------------------------------------------

    def _option(self, request: Request) -> None:
        name = "ec_transfer_params" if self._often(0.4) else self._pick([*OPTIONS])
        self._is(name)
        value = self._params() if name == "ec_transfer_params" else self._pick(OPTIONS[name])
        if type(value) is int and self._often(0.3):
            value = self._pick(spellings(value))
        request.tree[name] = value

    def _params(self) -> Any:
        """What proxies hand from engine to engine, and what they do not."""
        if self._often(0.15):
            return self._pick(VALUES)
        names = [each.name for each in (*self._own, *self._shown) if self._often(0.4)]
        grid = [1, 16, 24]
        params = {name: self._pick([self._item(), {}, None, 5, [], "x"]) for name in names}
        if self._often(0.3):
            listed = [{"mm_hash": name, **self._item()} for name in names]
            params["ec_items"] = self._pick([listed, listed, [None], {}, 5, [{}] * 1000, [grid]])
        if self._often(0.3):
            params["ecd_consumers"] = self._pick([*NODES, NODES, ["127.0.0.1:1"] * 1000, [NODES]])
        if self._often(0.1):
            params |= {f"{number}": self._item() for number in range(500)}
        return params

    def _item(self) -> dict[str, Any]:
        grids = [[1, 16, 24], [1.0, -16, 24], None, {}]
        return {
            "ecd_node": self._pick(NODES),
            "ecd_extent": self._pick(EXTENTS),
            "item_indices": self._pick([[0], [5], [-1], None, "0"]),
            "metadata": self._pick([{}, None, [], 5, {"image_grid_thw": self._pick(grids)}]),
        }

    # -- ordinary parts ------------------------------------------------------------------------

    def _content(self) -> Content:
        """A name that an attacker knows, with its picture or video."""
        lot = self._chance.random()
        if lot < 0.6:
            return self._pick(self._own)
        self._is("odd name" if lot < 0.68 else "another's name")
        return self._pick(ODD if lot < 0.68 else self._shown)

    def _seen(self) -> Any:
        """A picture or a video without a name."""
        return shown(self._pick([*self._own, *self._shown]))

    def _named(self) -> Any:
        more = [{}, {}, {"detail": "high"}, {"detail": 5}, {"cache_control": {}}, {"type": None}]
        return named(self._content(), **self._pick(more))

    def _described(self) -> Any:
        self._is("bare", SAME_OR_FAILS)
        return described(self._content())

    # -- odd parts -----------------------------------------------------------------------------

    def _text(self) -> Any:
        self._is("text")
        return text(self._pick(ODD_TEXTS))

    def _misdescribed(self) -> Any:
        """Metadata that are not those of the name's content, or in another spelling."""
        self._is("spelling", SAME_OR_FAILS)
        content = self._content()
        right = list(content.grid)
        how = self._chance.randrange(5)
        if how < 2:
            grid: list[Any] = [*right]
            for _ in range(self._pick([1, 1, 2, 3])):
                at = self._chance.randrange(3)
                grid[at] = self._pick(spellings(right[at])[: self._pick([EQUAL, EQUAL, None])])
            return described(content, grid)
        if how == 2:
            self._is("tensor as metadata")
            value = torch.tensor(right).to(self._pick(DTYPES))
            forms = (
                value,
                value,
                value[None],
                value[:2],
                value[0],
                value[:0],
                value * -1,
                value.flip(0),
            )
            return described(content, packed(self._pick(forms)))
        if how == 3:
            self._is("fields")
            embeds, own = f"{content.kind}_embeds", f"{content.kind}_grid_thw"
            other = "video_grid_thw" if content.kind == "image" else "image_grid_thw"
            odd = {embeds: None, "pixel_values": [0.5], "": 1, other: right}
            name = self._pick([*odd])
            if self._often(0.3):
                self._is("what ends a plain engine", ANY)
                name = self._pick(["pixel_values", "pixel_values_videos", "second_per_grid_ts"])
                odd = {name: packed(self._pick([tensor(384, 7), tensor(384, 1176), tensor(3)]))}
            both = {own: right, name: odd[name]}
            twice = Pairs([(own, right), (own, self._grid(right))])
            fields = self._pick([both, {name: odd[name]}, {}, twice])
            return bare(content, ("type", embeds), (embeds, fields))
        return described(content, self._grid(right))

    def _grid(self, right: list[int]) -> Any:
        _, height, width = right
        return self._pick(
            [
                *([], [right], [[right]], right[:2], [*right, 1], right * 2, right[::-1], None, 16),
                *({"0": 1}, "1,16,24", [0, 0, 0], [-1, -height, width], [1, -height, -width]),
                *([height, 1, width], [1, height * 2, width // 2], [1, height // 2, width // 2]),
                *([4, height // 2, width // 2], [1 << 20, 1 << 20, 1 << 20], [1, 2, 2]),
            ]
        )

    def _left_out_media(self) -> Any:
        """A name and no media at all, by every kind of part."""
        self._is("left out", SAME_OR_FAILS)
        content = self._content()
        kinds = {
            f"{content.kind}_url": [None, {"url": None}, {"url": ""}, {}, "", []],
            f"{content.kind}_embeds": [None, {}, "", []],
            "image_pil": [None, {}, "x", 5],
            "input_image": [None],
        }
        kind = self._pick([*kinds][: 2 if content.kind == "video" else None])
        pairs = ("type", kind), (kind, self._pick(kinds[kind]))
        return bare(content, *pairs[self._pick([0, 1]) :])

    def _unknown(self) -> Any:
        """A name that nobody has given to anything."""
        self._is("nobody's name", ANY)
        kind = self._pick(["image", "video"])
        content = content_of(f"nobody-{next(self._numbers)}")._replace(kind=kind)
        nothing = bare(content, ("type", f"{kind}_url"), (f"{kind}_url", None))
        return self._pick([described(content), nothing])

    def _uploaded(self) -> Any:
        self._is("upload")
        number, grid = self._chance.randrange(4), [1, 16, 24]
        value, forms = tensor(96, WIDTH, seed=number), [grid, packed(torch.tensor(grid))]
        kind = self._pick(["image", "video"])
        return uploaded(f"{kind}-tensor-{number}", packed(value), self._pick(forms), kind)

    def _torn(self) -> Any:
        """A tensor of the client's own that no encoder makes.

        None has a narrower dtype than others: vLLM computes all of a step in that of the first.
        """
        self._is("torn upload", SAME_OR_FAILS)
        right, grid = tensor(96, WIDTH), [1, 16, 24]
        values = [right, right.double(), right.to_sparse()]
        grids: list[Any] = [grid, [1.0, 16.0, 24.0], None, [grid], packed(torch.tensor([grid]))]
        if self._often(0.2):
            self._is("what ends a plain engine", ANY)
            shapes = (
                (95, WIDTH),
                (96, WIDTH // 2),
                (96,),
                (1, 96, WIDTH),
                (0, WIDTH),
                (24, 4 * WIDTH),
            )
            values = [right, right, *(tensor(*shape) for shape in shapes)]
            values += [torch.full((96, WIDTH), value) for value in (torch.nan, torch.inf)]
            values += [right.to(torch.float8_e4m3fn), right.to(torch.complex64)]
            grids = [grid, [1, -16, -24], [96, 2, 2], [1, 1 << 31, 24]]
        other = ["", "AAAA", "!", b64encode(b"PK\3\4").decode(), [0.5], None]
        embeds = packed(self._pick(values)) if self._often(0.7) else self._pick(other)
        part = uploaded(f"torn-{next(self._numbers)}", embeds, self._pick(grids))
        if self._often(0.2):
            part["image_embeds"] = embeds
        return part

    def _no_picture(self) -> Any:
        self._is("no picture")
        return picture(self._pick(NO_URLS))

    def _other_form(self) -> Any:
        """A picture or a video in a form that is nearly vLLM's."""
        self._is("form")
        content = self._pick(self._own)
        url, kind = content.url, f"{content.kind}_url"
        if self._often(0.2):
            self._is("URL as text")
            return {"type": kind, kind: url}
        image, pixels = {kind: {"url": url}}, url.partition(",")[2]
        urls = [
            *(url.replace("data:", "DATA:"), f"data:image/jpeg;base64,{pixels}", f" {url}"),
            *(f"data:;base64,{pixels}", f"{url}\n", url[:-200], f"data:video/jpeg;base64,{pixels}"),
        ]
        one, other = ("type", kind), (kind, {"url": url})
        words = ("type", "text"), ("text", "a")
        return self._pick(
            [
                *({"type": kind, kind: {"url": each}} for each in urls),
                *({kind: url}, image, {"type": "input_image", kind: url}),
                *({"type": "input_image", **image}, {"type": content.kind, **image}),
                {**shown(content), "image_embeds": {"image_grid_thw": [1, 16, 24]}},
                {**shown(content), "video_embeds": {"video_grid_thw": [1, 16, 24]}},
                *({**text("a"), **image}, {**text("a"), **image, "uuid": None}),
                Pairs([one, (kind, {"url": "x"}), other]),
                *(Pairs([*words, one, other]), Pairs([one, other, *words])),
            ]
        )

    def _stranger(self) -> Any:
        """Parts of other media, and what is no part."""
        self._is("other media")
        url, grid = self._pick(OWN).url, [1, 16, 24]
        frames = ",".join([url.partition(",")[2]] * 2)
        embeds, video = packed(tensor(4, WIDTH)), {"video_grid_thw": grid}
        media = [
            *(
                (f"{kind}_url", v)
                for kind in ("audio", "video")
                for v in (None, {}, {"url": url}, url)
            ),
            *(("video_url", {"url": f"data:video/jpeg;base64,{frames}"}),) * 2,
            *(("input_audio", {"data": "AAAA", "format": "wav"}), ("input_audio", None)),
            *(("audio_embeds", v) for v in (embeds, {"audio_embeds": embeds}, None)),
            *(("video_embeds", v) for v in (embeds, video, None, {"image_grid_thw": grid})),
            ("video_embeds", {"video_grid_thw": [1.0, 16.0, 24.0]}),
            ("video_embeds", {**video, "second_per_grid_ts": [1.0]}),
            *(
                ("image_embeds", {"image_grid_thw": grid}),
                ("image_embeds", None),
                ("image_url", None),
            ),
            *((kind, "a") for kind in ("refusal", "thinking", "input_text", "tool_reference")),
        ]
        other = [
            *({"type": "prompt_embeds", "data": v} for v in (embeds, "")),
            *({"type": kind, "text": "a"} for kind in ("output_text", "unheard", "", 5, None, [])),
            *({"type": "tool_reference", "name": "a"}, {"text": "a"}, {"uuid": "mine-0"}),
            *("a", "", 5, None, [], {}, ["a"]),
        ]
        if self._often(0.3):
            return self._pick(other)
        kind, value = self._pick(media)
        part = {"type": kind, kind: value}
        if self._often(0.5) or kind.startswith("image"):
            return part
        self._is("other media's name", SAME_OR_FAILS)
        return Kept({**part, "uuid": f"media-{next(self._numbers)}"})


def _has_kept(tree: Any) -> bool:
    if isinstance(tree, Kept):
        return True
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return any(map(_has_kept, inner))
