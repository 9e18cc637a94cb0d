"""The target's tokenizer: what ends an answer, what the template adds, which ids have a name."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest
from tests.helpers.preparing import THINKING, THINKING_SUPPLIED

from draftproof.errors import DataError
from draftproof.recipe import TargetSettings
from draftproof.target.target import open_target
from draftproof.target.tokenizer import closing_ids, closing_text, encode, inserted_text, load_tokenizer, named_ids, render, stop_ids


def test_what_the_template_adds(tt_plain):
    assert closing_text(tt_plain) == "<|im_end|>\n"
    assert closing_ids(tt_plain) == (2,)
    assert inserted_text(tt_plain) == ""
    for template, inserted in ((THINKING, "<think>\n\n</think>\n\n"), (THINKING_SUPPLIED, "")):
        tokenizer = copy.deepcopy(tt_plain)
        tokenizer.chat_template = template
        assert inserted_text(tokenizer) == inserted


def test_rendering_is_encoding_the_template(tt_plain):
    messages = [{"role": "user", "content": "Hello <|im_end|> you"}]
    text = "<|im_start|>user\nHello <|im_end|> you<|im_end|>\n<|im_start|>assistant\n"
    assert render(tt_plain, messages, add_generation_prompt=True) == encode(tt_plain, text)
    assert encode(tt_plain, text).count(2) == 2


def test_stop_ids_come_from_every_place(tm_folder, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(tm_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    target = open_target(TargetSettings(model=str(folder)))
    tokenizer = load_tokenizer(target)
    assert stop_ids(tokenizer, target) == (2, 7)
    tokenizer.eos_token = "<|endoftext|>"
    assert stop_ids(tokenizer, target) == (0, 2, 7)


def test_rows_of_the_head_without_a_name(tt_plain):
    named = named_ids(tt_plain, 320)
    assert named.shape == (320,)
    assert np.flatnonzero(named).tolist() == sorted(set(tt_plain.get_vocab().values()))
    assert not named[len(tt_plain) :].any()
    assert named_ids(tt_plain, 10).tolist() == [True] * 10


def test_a_folder_without_a_tokenizer(tm_folder, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(tm_folder, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(DataError, match="tokenizer cannot be loaded"):
        load_tokenizer(open_target(TargetSettings(model=str(folder))))
