"""The protocol: transformers' own handlers of completions and chats, with a memory beside each request."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastapi import Body, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseGenerateManager, DirectStreamer, GenerationState, _StreamError

from atlas_memory.console import one_line
from atlas_memory.data.tokenization import CHAT_STOP, CHAT_TEMPLATE, chat_tokenizer
from atlas_memory.eval.sampling import split_at_stop
from atlas_memory.models import Memory
from atlas_memory.serve.batching import Engine, make_request
from atlas_memory.serve.memory_folder import MemoryFolder
from atlas_memory.train.run_model import Run

LISTEN = 0.5  # seconds between two looks whether a client has hung up
DEFAULT_TOKENS = 1024  # of an answer
UNSUPPORTED = (
    *("n", "best_of", "logprobs", "top_logprobs", "echo", "suffix", "tools", "functions", "response_format"),
    "generation_config",
)
"""Fields that transformers would ignore, or answer in a way of its own."""


class OneModel(ModelManager):
    """The model of a run, under the name of its folder."""

    def __init__(self, run: Run) -> None:
        super().__init__(model_timeout=-1)
        self.run, self.force_model = run, run.folder.resolve().name
        self.tokenizer = chat_tokenizer(run.tokenizer)
        # As `atlas generate` draws; without this, transformers takes the likeliest token at every temperature.
        run.model.generation_config = GenerationConfig.from_model_config(run.model.config)
        run.model.generation_config.update(do_sample=True, temperature=0.8, top_k=40)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self.run.model, self.tokenizer


class RequestManager(BaseGenerateManager, GenerationState):
    """Continues one request from `memory`; `save` keeps what the memory holds then (None: nothing is kept). Once `left`
    is set, nobody waits for the answer any more."""

    def __init__(self, engine: Engine, memory: Memory, save: Callable[[Memory], None] | None, seed: int | None) -> None:
        GenerationState.__init__(self)
        self.engine, self.memory, self.save, self.seed = engine, memory, save, seed
        self.left = False

    def get_manager(self, model_id: str, use_cb: bool = False) -> RequestManager:
        return self

    def stop(self) -> None:
        """Nothing: the engine serves others."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], DirectStreamer]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        streamer = StopStreamer(processor._tokenizer, loop, queue, response_parser)
        streamer.stops = list(gen_config.stop_strings or ())
        streamer.put(torch.empty(0))  # transformers takes what comes first for the prompt

        def ended(result: Any) -> None:
            if (error := result.exception()) is None:
                streamer.end()
            elif not streamer._cancelled.is_set():
                said = json.dumps(one_line(error))[1:-1]  # transformers puts it between quotes
                loop.call_soon_threadsafe(queue.put_nowait, _StreamError(said))

        self._submit(processor, inputs, gen_config, lambda t: streamer.put(torch.tensor([t]))).add_done_callback(ended)
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        ids = await asyncio.wrap_future(self._submit(processor, inputs, gen_config, self._on_token))
        text = processor.decode(ids, skip_special_tokens=True)
        return split_at_stop(text, gen_config.stop_strings or ())[0], inputs["input_ids"].shape[-1], ids

    def _on_token(self, _: int) -> None:
        if self.left:
            raise ConnectionError("the client has hung up")

    def _submit(self, tokenizer: Any, inputs: Any, config: Any, on_token: Callable[[int], None]) -> Any:
        ids = inputs["input_ids"].long().cpu()
        begins = tokenizer("").input_ids  # before every text; behind what was read there is none
        if begins and ids[0, : len(begins)].tolist() == begins:
            ids = ids[:, len(begins) :]
        return self.engine.submit(
            make_request(self.memory, ids, config, tokenizer, self.seed, on_token=on_token, on_end=self.save)
        )


class StopStreamer(DirectStreamer):
    """Holds back what may be the beginning of a stop, and leaves it out."""

    stops: list[str] = []  # noqa: RUF012
    held = ""

    def _enqueue(self, item: Any) -> None:
        if isinstance(item, str):
            item, self.held = split_at_stop(self.held + item, self.stops)
        elif self.held and not any(stop in self.held for stop in self.stops):
            super()._enqueue(self.held)
        if item is None or item:
            super()._enqueue(item)


class Server:
    """What the routes share: a model, its memories and the engine.

    Args:
        run: The model.
        folder: Of the memories.
        max_batch_size: Requests that are continued at once.
        max_loaded: Memories that stay loaded.
        max_tokens: Of an answer.
    """

    def __init__(self, run: Run, folder: Path, max_batch_size: int, max_loaded: int, max_tokens: int) -> None:
        self.empty, self.max_tokens = Memory.empty(run.model), max_tokens
        self.models, self.engine = OneModel(run), Engine(run.model, max_batch_size)
        self.memories = MemoryFolder(folder, run.model, max_loaded)

    async def answer(self, handler: type[Any], request: Request, body: dict[str, Any]) -> Any:
        """The answer of one of transformers' handlers. HTTPException for what cannot be answered."""
        try:
            self._check(body)
            state = await self._state(body.pop("memory", None), body.pop("save_as", None), body.pop("seed", None))
            if body.get("model") in (str(self.models.run.folder), None):
                body["model"] = self.models.force_model
            handling = handler(model_manager=self.models, generation_state=state)
            answering = asyncio.ensure_future(handling.handle_request(body, uuid.uuid4().hex))
            try:
                while not (await asyncio.wait([answering], timeout=LISTEN))[0]:
                    state.left = state.left or await request.is_disconnected()
            finally:  # also where the server ends
                state.left = True
            answer = answering.result()
            if isinstance(answer, StreamingResponse):
                answer.body_iterator = _done_at_end(answer.body_iterator)
            return answer
        except FileNotFoundError as error:
            raise HTTPException(404, one_line(error)) from error
        except OSError as error:
            raise HTTPException(507, one_line(error)) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise HTTPException(400, one_line(error)) from error

    def _check(self, body: dict[str, Any]) -> None:
        """Fill in the default of max_tokens. ValueError for what would be ignored, and for more tokens than allowed."""
        for name in UNSUPPORTED:
            if body.get(name) not in (None, False, [], 1 if name in ("n", "best_of") else None):
                raise ValueError(f"{name} is not supported: leave it out")
        for name in ("max_tokens", "max_completion_tokens"):
            if (asked := body.get(name)) is not None and (type(asked) is not int or not 1 <= asked <= self.max_tokens):
                raise ValueError(f"{name}={asked!r} must be a whole number from 1 to {self.max_tokens:,}")
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
            body["max_tokens"] = min(DEFAULT_TOKENS, self.max_tokens)

    async def _state(self, name: Any, save_as: Any, seed: Any) -> RequestManager:
        if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**64):
            raise ValueError(f"seed={seed!r} must be a whole number of 64 bits")
        if save_as is not None:
            self.memories.path(save_as)
        memory = self.empty if name is None else await asyncio.to_thread(self.memories.load, name)
        save = None if save_as is None else partial(self.memories.save, save_as)
        return RequestManager(self.engine, memory, save, seed)


async def _done_at_end(parts: Any) -> AsyncIterator[Any]:
    """A stream, ended as OpenAI ends it."""
    async for part in parts:
        yield part
    yield "data: [DONE]\n\n"


def make_app(
    run: Run, folder: Path, max_batch_size: int, max_loaded: int, max_tokens: int, hosts: list[str]
) -> FastAPI:
    """The application; arguments as of `Server`, and the `hosts` as which it answers. ValueError if the model has no
    end-of-text token; OSError if the folder cannot be made."""
    server, app = Server(run, folder, max_batch_size, max_loaded, max_tokens), FastAPI(docs_url=None)
    name, template = server.models.force_model, server.models.tokenizer.chat_template
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)

    @app.exception_handler(StarletteHTTPException)
    def refuse(_: Request, error: StarletteHTTPException) -> JSONResponse:
        said = {"message": error.detail, "type": "invalid_request_error", "code": error.status_code}
        return JSONResponse({"error": said}, error.status_code)

    @app.exception_handler(RequestValidationError)
    def refuse_body(request: Request, error: RequestValidationError) -> JSONResponse:
        return refuse(request, HTTPException(422, f"the body must be a JSON object: {error.errors()[0]['msg']}"))

    @app.post("/v1/completions")
    async def completions(request: Request, body: dict[str, Any] = Body()) -> Any:  # noqa: B008
        return await server.answer(CompletionHandler, request, body)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: dict[str, Any] = Body()) -> Any:  # noqa: B008
        if not isinstance(messages := body.get("messages"), list) or not messages:
            raise HTTPException(400, "messages must be a list of at least one message with role and content")
        if template == CHAT_TEMPLATE and not body.get("stop"):
            body["stop"] = [CHAT_STOP]
        return await server.answer(ChatCompletionHandler, request, body)

    about = {"id": name, "object": "model", "created": 0, "owned_by": "atlas-memory"}

    @app.get("/v1/models")
    def list_models() -> Any:
        return {"object": "list", "data": [about]}

    @app.get("/v1/models/{model}")
    def get_model(model: str) -> Any:
        if model != name:
            raise HTTPException(404, f"there is no model {model!r}, but {name!r}")
        return about

    @app.get("/v1/memories")
    def list_memories() -> Any:
        return {"object": "list", "data": [{"id": name, "object": "memory"} for name in server.memories.names()]}

    @app.get("/health")
    def health() -> Any:
        return {"status": "ok"}

    return app
