"""The server, asked by real clients: the package `openai` and plain requests."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import openai
import pytest
import torch
import uvicorn
from transformers import GenerationConfig

from atlas_memory.data import byte_tokenizer, encode
from atlas_memory.models import Memory
from atlas_memory.serve.app import RequestManager, make_app
from atlas_memory.serve.memory_folder import MemoryFolder
from atlas_memory.train.run_model import Run, load_run

HOSTS = ["localhost", "127.0.0.1"]


@pytest.fixture(scope="module")
def run(six_steps: Path) -> Run:
    return load_run(six_steps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Path:
    folder = tmp_path_factory.mktemp("memories")
    for name in "abc":
        run.model.read(f"document {name} " * 20, run.tokenizer, name=name).save(folder / f"{name}.memory")
    return folder


@pytest.fixture(scope="module")
def port(run: Run, folder: Path) -> Iterator[int]:
    config = uvicorn.Config(make_app(run, folder, 4, 2, 100_000, HOSTS), port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(port: int, path: str, body: Any, host: str = "localhost") -> tuple[int, str]:
    """The status and the answer to a request of curl's kind."""
    connection = http.client.HTTPConnection("localhost", port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json", "Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def alone(run: Run, folder: Path, prompt: str, tokens: int, name: str | None) -> str:
    """The likeliest text, without the server."""
    memory = Memory.load(folder / f"{name}.memory", run.model) if name else Memory.empty(run.model)
    ids = torch.from_numpy(encode(run.tokenizer, prompt).astype("int64"))[None]
    found = run.model.generate(ids, memory=memory, max_new_tokens=tokens, do_sample=False)
    return run.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("name", ["a", "b", None])
@pytest.mark.parametrize("prompt", ["document", ""])
def test_completions(client: openai.OpenAI, run: Run, folder: Path, name: str | None, prompt: str) -> None:
    body = {"memory": name} if name else None
    options = {"model": "run", "prompt": prompt, "max_tokens": 12, "temperature": 0, "extra_body": body}
    whole = client.completions.create(**options)
    assert whole.choices[0].text == alone(run, folder, prompt, 12, name)
    assert whole.usage.completion_tokens == 12 and whole.choices[0].finish_reason == "length"
    parts = list(client.completions.create(stream=True, **options))
    streamed = "".join(part.choices[0].text for part in parts)
    assert not whole.choices[0].text.removeprefix(streamed).strip("\ufffd")  # half a character is not streamed


def test_draws(client: openai.OpenAI) -> None:
    options = {"model": "run", "prompt": "d", "max_tokens": 12, "extra_body": {"memory": "a"}}
    found = [client.completions.create(seed=seed, **options).choices[0].text for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_chat_and_stops(client: openai.OpenAI, run: Run, folder: Path) -> None:
    asked = [{"role": "user", "content": "document"}]
    options = {"model": "run", "messages": asked, "max_tokens": 12, "temperature": 0, "extra_body": {"memory": "a"}}
    whole = client.chat.completions.create(**options).choices[0].message.content
    assert whole == alone(run, folder, "User: document\nAssistant:", 12, "a")
    for stop in (whole[3:5], whole[-1]):
        cut = client.chat.completions.create(stop=[stop], **options).choices[0]
        assert cut.message.content == whole[: whole.index(stop)] and cut.finish_reason == "stop"
        parts = client.chat.completions.create(stop=[stop], stream=True, **options)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == cut.message.content
    parts = client.chat.completions.create(stop=["never"], stream=True, **options)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_read_is_kept(client: openai.OpenAI, run: Run, folder: Path, stream: bool) -> None:
    before = (folder / "a.memory").read_bytes()
    body = {"memory": "a", "save_as": f"kept-{stream}"}
    options = {"model": "run", "prompt": "more", "max_tokens": 5, "temperature": 0, "extra_body": body}
    found = client.completions.create(stream=stream, **options)
    assert not stream or list(found)
    kept = Memory.load(folder / f"kept-{stream}.memory", run.model)
    was = Memory.load(folder / "a.memory", run.model)
    assert (folder / "a.memory").read_bytes() == before
    prompt = torch.tensor([list(b"more")])
    after = run.model.read(run.model.generate(prompt, memory=was, max_new_tokens=5, do_sample=False), memory=was)
    assert kept.tokens == was.tokens + 9 == after.tokens
    assert kept.layers[0].written > 0
    for one, other in zip(kept.states, after.states, strict=True):
        for a, b in zip(one.tensors(), other.tensors(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    listed = [memory["id"] for memory in json.loads(get(client, "/memories"))["data"]]
    assert {"a", "b", "c", f"kept-{stream}"} <= set(listed)


def get(client: openai.OpenAI, path: str) -> str:
    connection = http.client.HTTPConnection("localhost", client.base_url.port, timeout=60)
    connection.request("GET", f"/v1{path}")
    return connection.getresponse().read().decode()


def test_many_clients_are_not_mixed_up(client: openai.OpenAI, run: Run, folder: Path) -> None:
    asked = [(f"document {n}"[: n % 10], "abc"[n % 3], 3 + n % 9) for n in range(40)]
    found: dict[int, str] = {}

    def ask(numbers: range) -> None:
        for n in numbers:
            prompt, name, tokens = asked[n]
            answer = client.completions.create(
                model="run", prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"memory": name}
            )
            found[n] = answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(range(first, 40, 8),)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: alone(run, folder, prompt, tokens, name) for n, (prompt, name, tokens) in enumerate(asked)}


BAD = {
    "no such memory": ({"memory": "missing"}, 404),
    "a memory elsewhere": ({"memory": "../a"}, 400),
    "an absolute path": ({"memory": "/etc/passwd"}, 400),
    "a hidden memory": ({"memory": ".a"}, 400),
    "a name that is a number": ({"memory": 3}, 400),
    "saved elsewhere": ({"save_as": "../../a"}, 400),
    "no tokens asked for": ({"max_tokens": 0}, 400),
    "a word for a number": ({"max_tokens": "many"}, 400),
    "a negative temperature": ({"temperature": -1}, 400),
    "another model": ({"model": "gpt"}, 400),
    "the name of a file": ({"memory": "a.memory"}, 400),
    "too many tokens": ({"max_tokens": 100_001}, 400),
    "several choices": ({"n": 2}, 400),
    "a configuration that asks for more": ({"generation_config": '{"max_new_tokens": 1000000}'}, 400),
    "log-probabilities": ({"logprobs": 3}, 400),
    "a list of prompts": ({"prompt": ["a", "b"]}, 400),
    "an unknown field": ({"memroy": "a"}, 422),
    "a seed that is no number": ({"seed": "x"}, 400),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(port: int, name: str) -> None:
    change, status = BAD[name]
    found, said = post(port, "/v1/completions", {"prompt": "a", "max_tokens": 2} | change)
    assert found == status and json.loads(said)["error"]["message"].count("\n") == 0
    assert post(port, "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200


def test_bad_bodies_chats_and_hosts(port: int) -> None:
    for body in (b"{", []):
        status, said = post(port, "/v1/completions", body)
        assert status == 422 and "JSON" in json.loads(said)["error"]["message"]
    assert post(port, "/v1/nothing", {})[0] == 404
    for messages in (None, [], "hi", [{"role": "user"}], ["hi"]):
        assert post(port, "/v1/chat/completions", {"messages": messages, "max_tokens": 2})[0] in (200, 400)
    assert post(port, "/v1/chat/completions", {"messages": [], "max_tokens": 2})[0] == 400
    assert post(port, "/v1/completions", {"prompt": "a"}, host="evil.example")[0] == 400


def test_damaged_memories_and_full_disks(port: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "broken.memory").write_bytes((folder / "a.memory").read_bytes()[:-9])
    status, said = post(port, "/v1/completions", {"memory": "broken", "max_tokens": 2})
    assert status == 400 and "cut short" in said
    (folder / "broken.memory").unlink()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    body = {"prompt": "a", "max_tokens": 2, "save_as": "full"}
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        status, said = post(port, "/v1/completions", body)
        assert status == 507 and "No space left" in said
        status, said = post(port, "/v1/completions", body | {"stream": True})
        assert status == 200 and "No space left" in json.loads(said.split("data: ")[-2])["error"]
    assert not list(folder.glob("*full*"))
    assert post(port, "/v1/completions", body)[0] == 200


def test_a_client_that_hangs_up(client: openai.OpenAI, run: Run, folder: Path) -> None:
    options = {"model": "run", "prompt": "document", "max_tokens": 100_000, "extra_body": {"save_as": "left"}}
    options["temperature"] = 0  # which does not come to an end of text
    for _ in range(6):  # more than are written at once: those that were left make room
        stream = client.completions.create(stream=True, **options)
        next(iter(stream))
        stream.close()
    body = {"model": "run", "prompt": "document", "max_tokens": 4, "temperature": 0}
    assert client.completions.create(**body).choices[0].text == alone(run, folder, "document", 4, None)
    assert not (folder / "left.memory").exists()


def test_a_client_that_hangs_up_without_a_stream(port: int, run: Run, folder: Path) -> None:
    """Its request ends, and others have its place."""
    for _ in range(6):
        with socket.create_connection(("localhost", port)) as connection:
            body = b'{"prompt": "d", "max_tokens": 100000}'
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            time.sleep(0.1)
    body = {"prompt": "document", "max_tokens": 4, "temperature": 0}
    status, said = post(port, "/v1/completions", body)
    assert status == 200 and json.loads(said)["choices"][0]["text"] == alone(run, folder, "document", 4, None)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["run"]
    assert client.models.retrieve("run").id == "run"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_streams_end_as_those_of_openai(port: int) -> None:
    status, said = post(port, "/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True})
    assert status == 200 and said.endswith("data: [DONE]\n\n")


def test_the_folder_drops_the_least_recently_used(run: Run, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / ".a.memory.1-2.partial").write_text("left by a kill")
    memories = MemoryFolder(tmp_path / "m", run.model, max_loaded=2)
    assert not list((tmp_path / "m").glob("*.partial"))
    first = memories.load("a")
    memories.load("b")
    assert memories.load("a") is first
    memories.load("c")
    assert memories.load("a") is first and list(memories._loaded) == ["c", "a"]
    run.model.read("other", run.tokenizer).save(tmp_path / "m" / "a.memory")  # by another process
    assert memories.load("a").tokens == 5
    memories.save("b", first)
    assert memories.load("b") is first and Memory.load(tmp_path / "m" / "b.memory", run.model).tokens == first.tokens


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def test_a_kill_loses_nothing_that_was_acknowledged(six_steps: Path, run: Run, tmp_path: Path) -> None:
    """And no file is left half written."""
    command = [sys.executable, "-m", "atlas_memory", "serve", str(six_steps), "--memories", str(tmp_path), "--port"]
    free = 20_000 + os.getpid() % 20_000
    with subprocess.Popen([*command, str(free)], stdout=subprocess.PIPE, text=True) as server:
        assert f":{free}/v1" in server.stdout.readline()
        until = time.monotonic() + 60
        while not listens(free) and time.monotonic() < until:
            time.sleep(0.05)
        acknowledged: dict[str, str] = {}

        def ask(who: int) -> None:
            n = 0
            while True:
                body = {"prompt": f"{who} {n}", "max_tokens": 1, "save_as": f"{who}-{n}"}
                try:
                    status, said = post(free, "/v1/completions", body)
                except (OSError, http.client.HTTPException):
                    return
                if status == 200:
                    acknowledged[f"{who}-{n}"] = said
                    n += 1

        threads = [threading.Thread(target=ask, args=(who,)) for who in range(3)]
        for thread in threads:
            thread.start()
        while len(acknowledged) < 20 and time.monotonic() < until:
            time.sleep(0.01)
        server.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join()
    found = MemoryFolder(tmp_path, run.model)
    assert len(acknowledged) >= 20
    assert acknowledged.keys() <= set(found.names()) and len(found.names()) <= len(acknowledged) + 3
    assert all(found.load(name).tokens == len(name) + 1 for name in found.names())


def test_a_tokenizer_keeps_its_own_template() -> None:
    from atlas_memory.data.tokenization import chat_tokenizer

    tokenizer = byte_tokenizer()
    assert chat_tokenizer(tokenizer).chat_template and not tokenizer.chat_template
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert chat_tokenizer(tokenizer) is tokenizer


def test_what_a_tokenizer_puts_before_every_text_is_left_out(run: Run) -> None:
    """A memory has begun its text."""
    manager = RequestManager(SimpleNamespace(submit=lambda request: request), Memory.empty(run.model), None, None)
    for begins, left in (([256], [[1, 2]]), ([], [[256, 1, 2]])):
        tokenizer = Mock(return_value=SimpleNamespace(input_ids=begins))
        given = {"input_ids": torch.tensor([[256, 1, 2]])}
        assert manager._submit(tokenizer, given, GenerationConfig(max_new_tokens=1), print).ids.tolist() == left
