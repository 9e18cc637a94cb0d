"""Opening a target."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof.errors import DataError, UsageError
from draftproof.recipe import TargetSettings
from draftproof.target.target import cache_dir, code_files, open_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tm_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(tm_folder, tmp_path / "target")
    return tmp_path / "target"


def mark(folder: Path) -> str:
    return open_target(TargetSettings(model=str(folder))).fingerprint


def test_fingerprint_is_of_the_contents_not_of_the_place(tm_folder: Path, folder: Path) -> None:
    assert mark(folder) == mark(tm_folder)
    (folder / "README.md").write_text("x")
    assert mark(folder) == mark(tm_folder)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_fingerprint_changes_with_each_file_that_makes_the_target(folder: Path, name: str) -> None:
    before = mark(folder)
    path = folder / name
    path.write_bytes(path.read_bytes() + b" ")
    assert mark(folder) != before


def test_fingerprint_sees_shards_and_code(folder: Path) -> None:
    before = mark(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    second = mark(folder)
    (folder / "modeling_x.py").write_text("pass\n")
    assert len({before, second, mark(folder)}) == 3
    assert list(code_files(folder)) == ["modeling_x.py"]


@pytest.mark.parametrize("name", ["spiece.model", "vocab.txt", "tekken.json", "gguf-source.json"])
def test_fingerprint_sees_other_forms_of_tokenizers_and_the_gguf_behind(folder: Path, name: str) -> None:
    before = mark(folder)
    (folder / name).write_text("one")
    first = mark(folder)
    (folder / name).write_text("two")
    assert len({before, first, mark(folder)}) == 3


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0], ids=["start", "middle", "end"])
def test_two_fine_tunes_of_one_shape_are_two_targets(folder: Path, place: float) -> None:
    """Headers and sizes are the same; in a file of 1 MiB only one number differs."""
    rows = torch.zeros(4096, 64)
    save_file({"w": rows}, folder / "model.safetensors")
    before = mark(folder)
    rows.view(-1)[int(place * (rows.numel() - 1))] = 1.0
    save_file({"w": rows}, folder / "model.safetensors")
    assert mark(folder) != before


def test_code_that_runs_makes_another_target(folder: Path) -> None:
    def trusting(trust: bool) -> str:
        return open_target(TargetSettings(model=str(folder), trust_remote_code=trust)).fingerprint

    assert trusting(True) == trusting(False), "there is no code to trust"
    (folder / "modeling_x.py").write_text("pass\n")
    assert trusting(True) != trusting(False)


def test_a_damaged_folder_opens_but_its_weights_do_not(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(1000)
    target = open_target(TargetSettings(model=str(folder)))
    assert target.config.layers == 8
    with pytest.raises(DataError, match=r"model\.safetensors is cut short"):
        target.weights()


def test_headers_are_read_once(tm_folder: Path) -> None:
    target = open_target(TargetSettings(model=str(tm_folder)))
    assert target.weights() is target.weights()


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "a/b/c", "", "~nosuchuser/x", "two words", "a/"])
def test_no_such_target(model: str) -> None:
    with pytest.raises(UsageError, match="no such target"):
        open_target(TargetSettings(model=model))


def test_a_weight_file_instead_of_its_folder(tm_folder: Path) -> None:
    with pytest.raises(UsageError, match="folder that holds"):
        open_target(TargetSettings(model=str(tm_folder / "model.safetensors")))


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("DRAFTPROOF_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "draftproof"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "draftproof"


class _Hub(BaseHTTPRequestHandler):
    """The few answers of a model hub that a snapshot needs, for one repository."""

    folder: Path

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        names = sorted(p.name for p in self.folder.iterdir())
        files = [{"type": "file", "path": name, "size": (self.folder / name).stat().st_size, "oid": name} for name in names]
        if path in ("/api/models/team/tiny", "/api/models/team/tiny/revision/main"):
            content = json.dumps({"id": "team/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}).encode()
        elif path == f"/api/models/team/tiny/tree/{COMMIT}":
            content = json.dumps(files).encode()
        elif path.startswith(f"/team/tiny/resolve/{COMMIT}/") and path.rpartition("/")[2] in names:
            content = (self.folder / path.rpartition("/")[2]).read_bytes()
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{path.rpartition("/")[2]}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(folder: Path) -> Iterator[str]:
    (folder / "weights.bin").write_bytes(b"never fetched")
    (folder / "modeling_x.py").write_text("pass\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"folder": folder}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def open_elsewhere(model: str, endpoint: str, home: Path, **environment: str) -> list[str]:
    """Open a hub id in a process of its own, since the hub client reads its environment when imported."""
    code = (
        "from draftproof.errors import DraftproofError; from draftproof.recipe import TargetSettings\n"
        "from draftproof.target.target import open_target\n"
        f"try: target = open_target(TargetSettings(model={model!r}))\n"
        "except DraftproofError as error: print(type(error).__name__, error.what)\n"
        "else: print(target.revision); print(target.config.layers, sorted(p.name for p in target.folder.iterdir()))"
    )
    clean = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment = {**clean, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=120)
    return done.stdout.splitlines()


def test_hub_ids_are_fetched_once_at_a_commit(hub: str, tmp_path: Path) -> None:
    first = open_elsewhere("team/tiny", hub, tmp_path / "hf")
    assert first[0] == COMMIT
    assert first[1].startswith("8 [")
    assert "model.safetensors" in first[1]
    assert "weights.bin" not in first[1]
    assert "modeling_x.py" not in first[1]
    assert open_elsewhere("team/tiny", hub, tmp_path / "hf", HF_HUB_OFFLINE="1") == first


def test_hub_ids_that_are_not_there(hub: str, tmp_path: Path) -> None:
    assert open_elsewhere("team/other", hub, tmp_path / "hf")[0].startswith("DataError The hub does not give this target")
    unreachable = open_elsewhere("team/tiny", "http://127.0.0.1:9", tmp_path / "hf", HF_HUB_OFFLINE="1")
    assert unreachable == ["DraftproofError There is no such folder, and the hub cannot be reached."]
