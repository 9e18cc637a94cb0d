"""C8: several processes write the same states; readers must never see half a file."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from draftproof.artifact import Journal, hash_file
from draftproof.errors import DamagedArtifact
from draftproof.records.store import Store

WRITER = """
import sys, time, pathlib, os, torch
from draftproof.records import store as module
from draftproof.records.layout import StoreLayout
from draftproof.records.store import StoreWriter
module.LOCK_WAIT_S = 0.5
folder = pathlib.Path(sys.argv[1])
fsync = os.fsync
def slow(descriptor):
    time.sleep(0.01)             # a pause between content and name
    fsync(descriptor)
os.fsync = slow
(folder.parent / f"ready-{os.getpid()}").touch()
while not (folder.parent / "go").exists():
    time.sleep(0.001)
states = torch.arange(1, 1 + 20 * 3 * 32, dtype=torch.float32).reshape(20, 3, 32)
ids = torch.zeros(20, dtype=torch.int32)
try:
    with StoreWriter(folder, StoreLayout((2, 4, 5), 32, "bf16", 320), [[i] for i in range(20)]) as writer:
        for index in range(20):
            writer.write_shard(index, [f"row-{index}"], [20], ids, states, states[:, 0], ids)
        time.sleep(1)
    print("wrote")
except Exception as error:
    print("refused", error)
"""


def test_one_of_four_writers_wins_and_a_reader_sees_whole_files_only(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    while len(list(tmp_path.glob("ready-*"))) < 4 and all(writer.poll() is None for writer in writers):
        time.sleep(0.01)  # a busy machine imports torch in one of them seconds after the others
    (tmp_path / "go").touch()
    proven: dict[str, str] = {}
    while any(writer.poll() is None for writer in writers):
        for record in Journal(folder / "journal.jsonl").read():
            path = folder / record["file"]
            if record["file"] not in proven:
                assert path.stat().st_size == record["size"]
                assert hash_file(path) == record["hash"]  # whole, the first time that it is seen
                proven[record["file"]] = record["hash"]
        time.sleep(0.002)
    answers = [writer.communicate()[0] for writer in writers]
    assert sorted(answer.split()[0] for answer in answers) == ["refused", "refused", "refused", "wrote"], answers
    assert sum("Another process writes this store." in answer for answer in answers) == 3
    assert len(Store(folder)) == 20


def test_a_reader_refuses_an_unfinished_store(tmp_path: Path) -> None:
    import pytest
    import torch

    from draftproof.records.layout import StoreLayout
    from draftproof.records.store import StoreWriter

    ids = torch.zeros(5, dtype=torch.int32)
    with StoreWriter(tmp_path, StoreLayout((2, 4, 5), 32, "bf16", 320), [[0], [1]]) as writer:
        writer.write_shard(0, ["a"], [5], ids, torch.ones(5, 3, 32), torch.ones(5, 32), ids)
        (tmp_path / "shard-00001.safetensors").write_bytes((tmp_path / "shard-00000.safetensors").read_bytes())  # a name without proof
        with pytest.raises(DamagedArtifact, match="Shard 1 of 2 is not sealed"):
            Store(tmp_path)
