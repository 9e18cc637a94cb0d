"""The target's tokenizer and chat template: messages to ids, and the tokens that end an answer.

    tokenizer = load_tokenizer(target)
    render(tokenizer, messages, add_generation_prompt=True)     # flat list of ints, whatever the library returns
    stop_ids(tokenizer, target)                                 # (2,)

Nothing here needs character offsets, so a tokenizer written in Python serves as well as a fast one. What is needed,
and proven when loading: control tokens in a rendered text become one id each, and rendering then encoding gives the
ids of the chat-template call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from draftproof.errors import DataError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from draftproof.target.target import Target

_PROBE = [{"role": "user", "content": "Say one word."}]
_ANSWER = "Probe-answer-7"


def load_tokenizer(target: Target) -> PreTrainedTokenizerBase:
    """The tokenizer of a target folder, proven fit for building masks.

    Raises UsageError when it has no chat template, DataError when it splits its own control tokens.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(target.folder, trust_remote_code=target.settings.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"The target's tokenizer cannot be loaded: {error}",
            where=str(target.folder),
            remedy="Complete the folder (tokenizer.json, tokenizer_config.json), or set target.trust_remote_code if it ships code.",
        ) from None
    prove(tokenizer, str(target.folder))
    return tokenizer


def prove(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raise unless the tokenizer has a chat template and turns rendered text into the ids the target is served with."""
    if not tokenizer.chat_template:
        raise UsageError(
            "The target's tokenizer has no chat template, so there is no prompt to learn from.",
            where=where,
            remedy="Take the instruction-tuned target, or add chat_template.jinja to its folder.",
        )
    special = control_tokens(tokenizer)
    for text in special:
        if encode(tokenizer, f"a{text}b").count(special[text]) != 1:
            raise DataError(
                f"The tokenizer splits its control token {text!r} into other ids.",
                where=where,
                remedy="Use the tokenizer class that the target ships (target.trust_remote_code), not a converted one.",
            )
    whole = render(tokenizer, _PROBE, add_generation_prompt=True)
    parts = encode(tokenizer, render_text(tokenizer, _PROBE, add_generation_prompt=True))
    if whole != parts:
        raise DataError(
            "Rendering the chat template and then encoding it gives other ids than the chat-template call.",
            where=where,
            remedy="This tokenizer cannot be supported; report its class name.",
        )


def to_ids(value: Any) -> list[int]:
    """Every form in which libraries return token ids, as one flat list of ints.

    Takes a list, tuple, numpy array or tensor (flat, or a batch of one), an object with `ids`, or a mapping with
    `input_ids` (transformers 5 returns one from the chat-template call: its length is its number of fields, and it is
    no `dict`). Raises DataError for anything else.
    """
    if isinstance(value, Mapping) or hasattr(value, "keys"):
        value = value["input_ids"]
    elif hasattr(value, "ids"):
        value = value.ids
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and len(value) == 1 and not isinstance(value, str) and not _is_int(value[0]):
        return to_ids(value[0])
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(_is_int(item) for item in value):
        raise DataError(
            f"The tokenizer returned a {type(value).__name__} that holds no flat list of ids.",
            remedy="Check the versions of transformers and of the target's own tokenizer code.",
        )
    return [int(item) for item in value]


def render_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
    """The chat template's text. Whatever the template raises (jinja2's TemplateError and others) passes through."""
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages], add_generation_prompt=add_generation_prompt, tokenize=False
    )
    assert isinstance(text, str)
    return text


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> list[int]:
    """The ids of the chat template, as an engine that serves the target would feed them."""
    conversation = [dict(message) for message in messages]
    return to_ids(tokenizer.apply_chat_template(conversation, add_generation_prompt=add_generation_prompt, tokenize=True))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a rendered text: control tokens recognised, none added."""
    return to_ids(tokenizer.encode(text, add_special_tokens=False))


def encode_many(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """`encode` of each text; a fast tokenizer does them together."""
    if not texts:
        return []
    if not tokenizer.is_fast:
        return [encode(tokenizer, text) for text in texts]
    batch = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    return [list(ids) for ids in batch["input_ids"]]


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The exact text of ids: control tokens written out, no spaces tidied."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Text and id of each special token, in order of the ids."""
    return {str(token.content): index for index, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special}


def stop_ids(tokenizer: PreTrainedTokenizerBase, target: Target) -> tuple[int, ...]:
    """Ids that end an answer, ascending: the eos of the tokenizer, of `generation_config.json` and `config.json`, and
    the token with which the chat template closes an assistant turn."""
    found: set[int] = set(closing_ids(tokenizer))
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    for name in ("generation_config.json", "config.json"):
        path = target.folder / name
        if path.is_file():
            value = json.loads(path.read_bytes()).get("eos_token_id")
            found.update(int(item) for item in (value if isinstance(value, list) else [value]) if item is not None)
    if not found:
        raise DataError(
            "Nothing says which token ends an answer of the target.",
            where=str(target.folder),
            remedy="Add eos_token_id to its generation_config.json.",
        )
    return tuple(sorted(found))


def closing_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The control token that the template prints first after an assistant's content; empty when it prints none."""
    first = encode(tokenizer, closing_text(tokenizer).lstrip())[:1]
    return tuple(index for index in first if index in control_tokens(tokenizer).values())


def closing_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the template prints after an assistant's content, such as `<|im_end|>` and a line break."""
    text = render_text(tokenizer, [*_PROBE, {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False)
    _, found, tail = text.rpartition(_ANSWER)
    return tail if found else ""


def inserted_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the template prints between the generation prompt and the content of a plain answer, usually nothing.

    Some templates print an empty think block there for answers without reasoning. It comes from the template, not
    from the target, so it is never supervised.
    """
    prompt = render_text(tokenizer, _PROBE, add_generation_prompt=True)
    whole = render_text(tokenizer, [*_PROBE, {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False)
    if not whole.startswith(prompt) or _ANSWER not in whole[len(prompt) :]:
        return ""
    return whole[len(prompt) :].partition(_ANSWER)[0]


def named_ids(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> np.ndarray:
    """bool [V]: whether an id of the LM head has an entry in the tokenizer. Padding rows of the head have none."""
    present = np.zeros(vocab_size, np.bool_)
    ids = np.fromiter(set(tokenizer.get_vocab().values()) | set(tokenizer.added_tokens_decoder), np.int64)
    present[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return present


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
