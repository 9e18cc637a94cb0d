"""Which checks stand before which stage, in order. A literal list, so that everything is seen at once."""

from __future__ import annotations

from draftproof.gate import data, parity, storage, target
from draftproof.gate.gate import Check
from draftproof.gate.host import host_disk, host_inodes
from draftproof.gate.machine import FREE, MACHINE, on_hosts
from draftproof.stage import Point

_STORAGE: tuple[Check, ...] = (storage.storage_writable, storage.storage_bytes, storage.storage_inodes)
_TARGET: tuple[Check, ...] = (
    target.target_shards,
    target.target_sizes,
    target.target_norm_convention,
    target.target_boundaries,
    target.target_draft,
    target.target_tokenizer,
    target.target_remote_code,
)
_DATA: tuple[Check, ...] = (
    data.data_supervised_share,
    data.data_template,
    data.data_split,
    data.data_finish_reasons,
)

_MACHINE: tuple[Check, ...] = tuple(on_hosts(check) for check in MACHINE if check not in (host_disk, host_inodes))
"""The run's own disk is in storage.py, which knows what is there already."""
_FREE: tuple[Check, ...] = tuple(on_hosts(check) for check in FREE)

UNLOADED: tuple[Check, ...] = (*_STORAGE, *_TARGET)
"""What can be asked of a recipe before any stage ran, beside its machines: the rest of `draftproof check RECIPE`."""

CHECKS: dict[tuple[str, Point], tuple[Check, ...]] = {
    ("regenerate", "before"): (*_STORAGE, *_TARGET, *_MACHINE),
    ("regenerate", "loading"): _FREE,
    ("prepare", "before"): (*_STORAGE, target.target_tokenizer, target.target_remote_code),
    ("vocab", "before"): (*_STORAGE, *_DATA),
    ("extract", "before"): (*_STORAGE, *_TARGET, *_DATA, *_MACHINE),
    ("extract", "loading"): (*_STORAGE, *_FREE),
    ("extract", "loaded"): (parity.parity_rows, parity.parity_logprobs, parity.parity_batching, parity.parity_boundaries),
    ("extract", "running"): (storage.storage_writable, storage.storage_bytes),
    ("train", "before"): (
        *_STORAGE,
        target.target_sizes,
        target.target_norm_convention,
        data.data_supervised_share,
        data.data_split,
        *_MACHINE,
    ),
    ("train", "loading"): _FREE,
    ("export", "before"): (*_STORAGE, target.target_sizes),
    ("evaluate", "before"): (*_STORAGE, *_TARGET, *_MACHINE),
    ("evaluate", "loading"): _FREE,
}
"""Points without an entry have nothing to check."""
