"""C9: "exists" is taken for "complete": cut files, zeroed files, another's content, a full disk."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.helpers.extraction import open_tm, stage_task, write_random_rows

from draftproof.artifact import hash_file
from draftproof.errors import Stopped
from draftproof.extract import stage
from draftproof.recipe import ExtractSettings
from draftproof.records.store import Store, StoreWriter
from draftproof.runfolder import stops_on_full_disk

LENGTHS = [20] * 10
TOKEN = 3 * 32 * 2 + 32 * 2 + 8
SETTINGS = ExtractSettings(boundaries=(2, 4, 5), shard_gb=20 * TOKEN / 1e9, batch_tokens=40, canary_rows=2)
"""One row a shard."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tm_folder: Path) -> Path:
    """Ten sealed shards of real states; `prepare/` beside `extract/`."""
    folder = tmp_path_factory.mktemp("c9")
    write_random_rows(folder / "prepare", LENGTHS)
    stage.run(stage_task(folder / "prepare", folder / "extract"), SETTINGS, open_tm(tm_folder, "float32"))
    return folder


def _cut(at: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: at(path.stat().st_size)])

    return damage


def _zero_second_half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


def _another_rows_content(path: Path) -> None:
    shutil.copyfile(path.with_name("shard-00000.safetensors"), path)


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    *((f"cut at {n}", _cut(lambda size, n=n: n)) for n in (0, 4, 8, 60)),  # type: ignore[misc]  # a default binds n
    ("cut in half", _cut(lambda size: size // 2)),
    ("last byte gone", _cut(lambda size: size - 1)),
    ("second half zeroed", _zero_second_half),
    ("another row's content", _another_rows_content),
    ("gone", lambda path: path.unlink()),
]


def test_every_damaged_shard_is_made_again_and_no_other(tmp_path: Path, tm_folder: Path, finished: Path) -> None:
    shutil.copytree(finished / "extract", tmp_path / "extract")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "extract").glob("shard-*")}
    for number, (_, damage) in enumerate(DAMAGES, start=1):
        damage(tmp_path / "extract" / f"shard-{number:05d}.safetensors")
    made: list[int] = []
    task = stage_task(
        finished / "prepare", tmp_path / "extract", lambda point, evidence: made.append(evidence["shard"]) if point == "running" else None
    )
    stage.run(task, SETTINGS, open_tm(tm_folder, "float32"))
    assert made == list(range(1, 10)), "each damage is noticed; shard 0 is whole"
    assert (tmp_path / "extract" / "shard-00000.safetensors").stat().st_mtime_ns == before["shard-00000.safetensors"]
    for path in (finished / "extract").glob("shard-*"):
        assert hash_file(path) == hash_file(tmp_path / "extract" / path.name)
    assert Store(tmp_path / "extract").contents() == Store(finished / "extract").contents()


def test_what_is_left_is_read_from_the_disk_each_time(tmp_path: Path, finished: Path) -> None:
    """A filter that remembers its answer said 4 of 4 to do where 3 were done."""
    shutil.copytree(finished / "extract", tmp_path / "extract")
    store = Store(finished / "extract")
    with StoreWriter(tmp_path / "extract", store.layout, [[i] for i in range(10)]) as writer:
        assert writer.sealed() == set(range(10))
        (tmp_path / "extract" / "shard-00003.safetensors").unlink()
        assert writer.sealed() == set(range(10)) - {3}
        shutil.copyfile(finished / "extract" / "shard-00003.safetensors", tmp_path / "extract" / "shard-00003.safetensors")
        assert writer.sealed() == set(range(10))


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 64 KiB."""
    folder = tmp_path / "staging"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_stops_cleanly_and_goes_on_when_there_is_room(staging: Path, tm_folder: Path, finished: Path) -> None:
    target = open_tm(tm_folder, "float32")
    with pytest.raises(Stopped, match="The disk is full") as stop, stops_on_full_disk(staging):
        stage.run(stage_task(finished / "prepare", staging / "extract"), SETTINGS, target)
    assert stop.value.exit_code == 5
    left = {path.name for path in (staging / "extract").iterdir()}
    assert not [name for name in left if name.endswith(".tmp")]
    with StoreWriter(staging / "extract", Store(finished / "extract").layout, [[i] for i in range(10)]) as writer:
        sealed = writer.sealed()
    assert 0 < len(sealed) < 10
    assert {f"shard-{index:05d}.safetensors" for index in sealed} == {name for name in left if name.startswith("shard")}
    subprocess.run(["mount", "-o", "remount,size=1m", str(staging)], check=True)
    outcome = stage.run(stage_task(finished / "prepare", staging / "extract"), SETTINGS, target)
    assert outcome.contents == Store(finished / "extract").contents()
