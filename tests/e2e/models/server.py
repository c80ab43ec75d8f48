"""vLLM's own API server over an engine of the matrix, with ecd's middleware in front of it.

The application, its chats and their media are vLLM's; only HTTP is left out, and the engine is in
this process, so that what it does can be counted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
from starlette.types import Message, Receive, Scope, Send
from vllm import LLM
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser

from e2e.models.items import part
from ecd_client.vllm import ReuseMiddleware
from support.waiting import eventually

TASKS = ("generate",)
_BYTES = b";base64,"
"""Stands once in a body for each medium that it brings."""


class _Client:
    """What vLLM's server needs of an engine's client, over an engine of this process."""

    errored = False

    def __init__(self, llm: LLM) -> None:
        self._engine = engine = llm.llm_engine
        self.vllm_config, self.model_config = engine.vllm_config, engine.model_config
        self.renderer, self.input_processor = engine.renderer, engine.input_processor

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        pass

    async def is_tracing_enabled(self) -> bool:
        return False

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **_: Any
    ) -> AsyncIterator[Any]:
        self._engine.add_request(request_id, prompt, sampling_params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                yield output


class Server:
    """Answers chats. With ecd's connector in the engine it has ecd's middleware."""

    def __init__(self, llm: LLM, marks: Mapping[str, str], *, has_middleware: bool) -> None:
        """`marks` have the text that stands for a medium of each kind in the model's prompts."""
        said = ["--model", llm.model_config.model, "--chat-template", template(marks)]
        said += ["--chat-template-content-format", "openai"]
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(said)
        self._loop = asyncio.new_event_loop()
        self._app = build_app(args, TASKS, llm.model_config)
        self._run(init_app_state(_Client(llm), self._app.state, args, TASKS))
        self._served: Any = self._note
        self._reuse: Any = None
        self._brought: list[int] = []
        if has_middleware:
            self._served = ReuseMiddleware(self._note)
            self._run(self._served._start(self._app.state))
            self._reuse = self._served._reuse

    def ask(self, items: list[str], tokens: int) -> dict[str, Any]:
        """The answer to a chat about these items, and how many of them vLLM got.

        There is a number for each time that the middleware has vLLM answer.
        """
        marks = [shown for item in items for shown in (text(" "), part(item))]
        body = {
            "messages": [{"role": "user", "content": [text("so"), *marks, text(" what is it?")]}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 3,
            "return_tokens_as_token_ids": True,
        }
        self._brought.clear()
        answer = self._run(self._post(body))
        self._await_outlines()
        if "choices" not in answer:
            raise ValueError(str(answer))
        [choice] = answer["choices"]
        said = choice["logprobs"]["content"]
        return {
            "reason": choice["finish_reason"],
            "tokens": [each["token"] for each in said],
            "values": [
                value
                for each in said
                for value in sorted(best["logprob"] for best in each["top_logprobs"])
            ],
            "brought": list(self._brought),
        }

    async def _post(self, body: dict[str, Any]) -> Any:
        transport = httpx.ASGITransport(self._served, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://matrix") as client:
            return (await client.post("/v1/chat/completions", json=body, timeout=None)).json()

    def _await_outlines(self) -> None:
        """Wait until what the middleware stores is stored, for whoever asks next."""
        if self._reuse is not None:
            eventually(lambda: not self._reuse._client._writer._pending, "outlines are stored")

    async def _note(self, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's application; notes how many media a request's body brings."""
        self._brought.append(0)

        async def noted() -> Message:
            message = await receive()
            self._brought[-1] += message.get("body", b"").count(_BYTES)
            return message

        await self._app(scope, noted, send)

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        if self._reuse is not None:
            self._run(self._reuse.close())
        self._loop.close()


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def template(marks: Mapping[str, str]) -> str:
    """A chat template that writes a message's parts, and nothing else."""
    branches = "".join(
        f"{{% elif part.type == '{kind}' %}}{{{{ {json.dumps(mark)} }}}}"
        for kind, mark in marks.items()
    )
    return (
        "{% for message in messages %}{% for part in message.content %}"
        f"{{% if part.type == 'text' %}}{{{{ part.text }}}}{branches}{{% endif %}}"
        "{% endfor %}{% endfor %}"
    )
