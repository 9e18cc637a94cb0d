"""B8: tokenizers without a fast form have no offsets; masks need none. Control tokens must stay whole."""

from __future__ import annotations

import pytest
from tests.helpers.preparing import chat
from transformers import PreTrainedTokenizer

from draftproof.errors import DataError, UsageError
from draftproof.prepare.template import Renderer
from draftproof.records.conversations import parse
from draftproof.records.jsonl import Line
from draftproof.target.tokenizer import closing_ids, encode, encode_many, prove

TEXTS = ("Grüße, 世界!", "emoji 👩‍🚀 and  two spaces")


class Bytes(PreTrainedTokenizer):
    """256 bytes and two added control tokens, in plain Python. CJK text splits inside a character."""

    def __init__(self, **kwargs):
        self._table = {f"<{i:02x}>": i for i in range(256)}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {**self._table, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        return [f"<{b:02x}>" for b in text.encode()]

    def _convert_token_to_id(self, token):
        return self._table[token]

    def _convert_id_to_token(self, index):
        return f"<{index:02x}>"

    def convert_tokens_to_string(self, tokens):
        return bytes(int(token[1:-1], 16) for token in tokens).decode("utf-8", "replace")


@pytest.fixture
def slow(tt_gen):
    tokenizer = Bytes(eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = tt_gen.chat_template
    return tokenizer


def test_masks_need_no_offsets(slow):
    prove(slow, "here")
    start, end = slow.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert closing_ids(slow) == (end,)
    for text in TEXTS:
        conversation = parse(Line(chat("What is 世?", text), "f:1"))
        (row,) = next(iter(Renderer(slow, (end,), 512, 300).render([conversation]))).rows
        prompt = [start, *"user\nWhat is 世?".encode(), end, *b"\n", start, *b"assistant\n"]
        assert row.ids.tolist() == [*prompt, *text.encode(), end]
        assert row.supervised.tolist() == [False] * len(prompt) + [True] * (len(text.encode()) + 1)


def test_encoding_many_is_encoding_each(slow, tt_plain):
    texts = ["<|im_start|>user\na<|im_end|>\n", *TEXTS, ""]
    for tokenizer in (slow, tt_plain):
        assert encode_many(tokenizer, texts) == [encode(tokenizer, text) for text in texts]


class Splitting(Bytes):
    """Encodes control tokens as if they were text, as plain tiktoken does."""

    def encode(self, text, **kwargs):
        return list(text.encode())


def test_a_tokenizer_that_splits_its_control_tokens_is_refused(tt_gen):
    tokenizer = Splitting(eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = tt_gen.chat_template
    with pytest.raises(DataError, match="splits its control token"):
        prove(tokenizer, "here")


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(UsageError, match="no chat template"):
        prove(Bytes(), "here")
