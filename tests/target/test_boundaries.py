"""Boundary lists."""

from __future__ import annotations

import pytest

from draftproof.errors import UsageError
from draftproof.target.boundaries import check_boundaries, default_boundaries, to_sglang, to_vllm


@pytest.mark.parametrize(("layers", "wanted"), [(61, (2, 30, 58)), (30, (2, 15, 27)), (32, (2, 16, 29)), (8, (2, 4, 5))])
def test_defaults(layers: int, wanted: tuple[int, ...]) -> None:
    assert default_boundaries(layers) == wanted
    assert check_boundaries(wanted, layers) == wanted


def test_dialects() -> None:
    assert to_vllm((2, 30, 58)) == [2, 30, 58]
    assert to_sglang((2, 30, 58)) == [1, 29, 57]


@pytest.mark.parametrize("wrong", [(), (0, 2), (2, 8), (2, 9), (4, 2), (2, 4, 4), (True, 2), (-1, 2)])
def test_wrong_lists(wrong: tuple[int, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        check_boundaries(wrong, 8)
    assert caught.value.where == "extract.boundaries"
