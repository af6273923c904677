"""The hub, played by a small server on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from attnlens.errors import (
    DamagedModelError,
    GatedModelError,
    ModelError,
    OfflineError,
    UnknownModelError,
)
from attnlens.models import describe_model, load_model, load_tokenizer

COMMIT = "c" * 40


class Hub:
    """A stand-in for the hub: repositories, and refusals.

    Attributes
    ----------
    folders : dict
        Repository -> folder with its files.
    refusals : dict
        Repository -> (status, error code) for everything asked of it.
    asked : list of str
        Files that were sent, in order.
    """

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.gates: dict[str, tuple[int, str]] = {}
        self.asked: list[str] = []

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        path = path.partition("?")[0].strip("/")
        api = path.startswith("api/models/")
        rest = path.removeprefix("api/models/")
        cut = "/revision/" if api else "/resolve/"
        repository, _, where = rest.partition(cut)
        if repository in self.refusals:
            status, code = self.refusals[repository]
            return status, {"X-Error-Code": code} if code else {}, b"{}"
        folder = self.folders.get(repository)
        if folder is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        revision, _, file = where.partition("/")
        if revision not in ("", "main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if api:
            files = [{"rfilename": p.name} for p in sorted(folder.iterdir())]
            body = {"id": repository, "sha": COMMIT, "siblings": files}
            return 200, {}, json.dumps(body).encode()
        if repository in self.gates:
            status, code = self.gates[repository]
            return status, {"X-Error-Code": code}, b"{}"
        if not (folder / file).is_file():
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b"{}"
        self.asked.append(file)
        content = (folder / file).read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, content


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    played = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = played.answer(self.path)
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield played
    server.shutdown()
    server.server_close()


def test_fetching_a_model(
    hub: Hub, zoo: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    hub.folders["gpt2"] = zoo("gpt2", tokenizer=True)
    model = load_model("gpt2-small")
    assert (model.facts.source, model.facts.revision) == ("gpt2", COMMIT)
    assert model.tokenizer is not None
    assert model.facts.weights_hash == load_model(zoo("gpt2", tokenizer=True)).facts.weights_hash
    assert "model.safetensors" in hub.asked
    assert capfd.readouterr() == ("", "")
    # What was fetched once is there when the hub is switched off.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.refusals["gpt2"] = (500, "")
    assert load_model("gpt2").facts.weights_hash == model.facts.weights_hash


def test_weights_are_fetched_once_as_safetensors(
    hub: Hub, zoo: Callable[..., Path], tmp_path: Path
) -> None:
    import shutil

    folder = Path(shutil.copytree(zoo("gpt2"), tmp_path / "m"))
    for extra in ("pytorch_model.bin", "tf_model.h5", "model-int8.onnx", "flax_model.msgpack"):
        (folder / extra).write_bytes(b"x")
    hub.folders["gpt2"] = folder
    load_model("gpt2")
    assert set(hub.asked) == {"config.json", "generation_config.json", "model.safetensors"}


def test_only_what_is_needed_is_fetched(hub: Hub, zoo: Callable[..., Path]) -> None:
    hub.folders["gpt2"] = zoo("gpt2", tokenizer=True)
    describe_model("gpt2")
    assert set(hub.asked) == {"config.json"}
    assert load_tokenizer("gpt2") is not None
    assert set(hub.asked) == {"config.json", "tokenizer.json", "tokenizer_config.json"}


def test_the_cache_serves_when_the_hub_does_not(hub: Hub, zoo: Callable[..., Path]) -> None:
    hub.folders["gpt2"] = zoo("gpt2")
    known = load_model("gpt2").facts.weights_hash
    hub.refusals["gpt2"] = (503, "")
    assert load_model("gpt2").facts.weights_hash == known
    hub.refusals["EleutherAI/pythia-70m"] = (503, "")
    with pytest.raises(OfflineError, match="HTTP 503"):
        load_model("pythia-70m")


@pytest.mark.parametrize(
    ("repository", "refusal", "kind", "says"),
    [
        ("meta-llama/Llama-2-7b-hf", (401, "GatedRepo"), GatedModelError, "hf auth login"),
        ("meta-llama/Llama-2-7b-hf", (403, "GatedRepo"), GatedModelError, "Accept its terms"),
        ("meta-llama/Llama-2-7b-hf", (401, ""), GatedModelError, "HTTP 401"),
        ("meta-llama/Llama-2-7b-hf", (403, ""), GatedModelError, "HTTP 403"),
        ("meta-llama/Llama-2-7b-hf", (401, "RepoNotFound"), GatedModelError, "HTTP 401"),
        ("some/thing", (401, ""), GatedModelError, "HTTP 401"),
        ("some/thing", (401, "RepoNotFound"), UnknownModelError, "nor a model on the hub"),
        ("some/thing", (404, "RepoNotFound"), UnknownModelError, "nor a model on the hub"),
        ("some/thing", (404, ""), UnknownModelError, "nor a model on the hub"),
        ("some/thing", (500, ""), OfflineError, "HTTP 500"),
    ],
)
def test_refusals(
    hub: Hub, repository: str, refusal: tuple[int, str], kind: type[ModelError], says: str
) -> None:
    """A32: one message each, and never the raw answer."""
    hub.refusals[repository] = refusal
    with pytest.raises(kind, match=says) as caught:
        load_model(repository)
    assert type(caught.value) is kind
    assert len(str(caught.value).splitlines()) <= 2
    assert "Client Error" not in str(caught.value)


def test_gated_files_of_a_public_page(hub: Hub, zoo: Callable[..., Path]) -> None:
    hub.folders["google/gemma-2b"] = zoo("gpt2")
    hub.gates["google/gemma-2b"] = (403, "GatedRepo")
    with pytest.raises(GatedModelError, match=r"huggingface\.co/google/gemma-2b"):
        load_model("gemma-2b")


def test_unknown_revisions_and_repositories_of_something_else(
    hub: Hub, zoo: Callable[..., Path], tmp_path: Path
) -> None:
    hub.folders["gpt2"] = zoo("gpt2")
    with pytest.raises(UnknownModelError, match="'gpt2' has no revision 'step7'"):
        load_model("gpt2@step7")
    hub.folders["some/dataset"] = tmp_path
    with pytest.raises(DamagedModelError, match=r"no config\.json"):
        load_model("some/dataset")
    with pytest.raises(UnknownModelError, match="Did you mean gpt2-small"):
        load_model("gpt2-smal")
