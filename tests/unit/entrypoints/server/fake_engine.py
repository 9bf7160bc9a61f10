"""An engine that says what it is told to, and the application over it: no model, no process, no socket."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import httpx

from octavo.entrypoints.server.app import make_app
from octavo.entrypoints.server.options import ServerArgs
from octavo.entrypoints.server.state import ServerState
from octavo.protocol.outputs import CompletionOutput, RequestOutput
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.stats import EngineStats


def output(text: str, finish_reason: str | None = None, index: int = 0, **fields: Any) -> RequestOutput:
    """A delta of one sample; a token a character."""
    completion = CompletionOutput(index, text, [ord(char) for char in text], finish_reason=finish_reason)
    return RequestOutput("id", "prompt", [1, 2, 3], [completion], finish_reason is not None, **fields)


class FakeEngine:
    """`script` is called for each request and makes its outputs; what it raises, the request raises."""

    def __init__(self, script: Callable[[], AsyncGenerator[RequestOutput, None]]) -> None:
        self._script = script
        self.num_open = 0
        self.num_started = 0
        self.errored = False
        self.dead_error: Exception | None = None
        self.config = SimpleNamespace(scheduler=SimpleNamespace(policy="fcfs", max_model_len=512))
        self.calls: list[dict[str, Any]] = []

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        self.calls.append({"prompt": prompt, "params": params, "request_id": request_id, **options})
        self.num_open += 1
        self.num_started += 1
        try:
            async for one in self._script():
                yield one
        finally:
            self.num_open -= 1

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(vocab_size=259)

    def stats(self) -> EngineStats:
        return EngineStats()

    def load(self) -> tuple[int, int, int]:
        return self.num_open, 0, 0


class Client:
    """The application over a fake engine, as a client sees it. Large answers are read whole."""

    def __init__(self, script: Callable[[], AsyncGenerator[RequestOutput, None]], **options: Any) -> None:
        self.engine = FakeEngine(script)
        args = ServerArgs(served_model_name=("fake",), **options).checked()
        self.state = ServerState(self.engine, args, "fake", args.read_api_keys())  # type: ignore[arg-type]
        self.state.is_loaded = True
        self.app = make_app(self.state)

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://fake") as client:
            return await client.request(method, path, **options)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.request("POST", "/v1/completions", json={"prompt": "p", **fields})

    async def complete_and_vanish(self, vanish: asyncio.Event, **fields: Any) -> list[dict[str, Any]]:
        """Ask, and go away once `vanish` is set; what had been sent by then."""
        body = json.dumps({"prompt": "p", **fields}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await vanish.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if not vanish.is_set():
                sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
            "headers": headers, "client": ("127.0.0.1", 1), "server": ("fake", 80),
        }  # fmt: skip
        await self.app(scope, receive, send)
        return sent
