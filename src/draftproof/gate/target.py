"""Checks of the target: its files, sizes, conventions, tokenizer and code, all without loading it."""

from __future__ import annotations

from draftproof.draft.engines import unsupported
from draftproof.gate.finding import Finding, failed, passed, unsure, warned
from draftproof.gate.gate import GateContext
from draftproof.target.boundaries import check_boundaries, default_boundaries, to_sglang, to_vllm
from draftproof.target.config import read_json_file
from draftproof.target.target import Target, code_files
from draftproof.target.weights import final_norm_name, head_name, shard_problems, size_problems


def target_shards(context: GateContext) -> Finding:
    """Every weight file is there, as long as its header says, and agrees with the index."""
    target = context.target
    if target is None:
        return _no_target("target.shards")
    if problems := shard_problems(target.folder):
        return failed("target.shards", _listed(problems), f"Fetch the named files of {target.folder} again.")
    files = {(info.file.name, info.file.stat().st_size) for info in map(target.weights().info, target.weights().names)}
    total = sum(size for _, size in files)
    return passed("target.shards", f"{len(files)} weight file(s), {len(target.weights().names)} tensors, {total / 1e9:.2f} GB, all whole")


def target_sizes(context: GateContext) -> Finding:
    """LM head, embedding and final norm are plain floats of the config's sizes."""
    target = context.target
    if target is None:
        return _no_target("target.sizes")
    weights, config = target.weights(), target.config
    if problems := size_problems(weights, config):
        return failed("target.sizes", _listed(problems), "Use a plain (unquantised head) target whose config.json belongs to its weights.")
    name = head_name(weights, config)
    nesting = f", sizes under {'.'.join(config.nesting)}" if config.nesting else ""
    tied = "tied head" if config.tied_head else "own head"
    shape = f"{weights.info(name).dtype} {list(weights.info(name).shape)}"
    return passed("target.sizes", f"{config.architecture}: {config.layers} layers, {tied} {name} {shape}{nesting}")


def target_norm_convention(context: GateContext) -> Finding:
    """It is known how the final norm applies its weight; a wrong guess spoils every teacher distribution."""
    target = context.target
    if target is None:
        return _no_target("target.norm_convention")
    config = target.config
    name = final_norm_name(target.weights(), config)
    form = "(1 + weight)" if config.norm_convention == "one_plus_weight" else "weight"
    mean = target.weights().read(name).float().mean().item()
    evidence = f"{name} scales by {form}, {config.model_type} (mean of the stored weight {mean:.3f}), eps {config.rms_norm_eps:g}"
    if not config.norm_convention_known:
        return warned(
            "target.norm_convention",
            f"{evidence}: assumed, since nobody has read the code of model type {config.model_type!r}",
            "The canary before extraction compares logits and will tell; nothing is spent before.",
        )
    return passed("target.norm_convention", evidence)


def target_boundaries(context: GateContext) -> Finding:
    """The aux boundaries fit the target's depth."""
    target = context.target
    if target is None:
        return _no_target("target.boundaries")
    found = _boundaries(context, target)
    origin = "by default" if context.recipe.extract.boundaries is None else "as the recipe says"
    return passed(
        "target.boundaries",
        f"{', '.join(map(str, found))} of {target.config.layers} layers, {origin} "
        f"(vLLM writes {to_vllm(found)}, SGLang {to_sglang(found)})",
    )


def target_draft(context: GateContext) -> Finding:
    """A draft of the recipe's shape can be made for this target, and every engine that it is exported for can serve it."""
    from draftproof.draft.eagle3 import draft_config  # torch, which only a run needs

    target, recipe = context.target, context.recipe
    if target is None:
        return _no_target("target.draft")
    rows, size = target.config.vocab_size, recipe.vocab.at_most(target.config.vocab_size)
    if size > rows:
        return failed(
            "target.draft",
            f"a draft vocabulary of {size:,} tokens, the target's has {rows:,}",
            f"Set vocab.size to at most {rows}, or to auto.",
        )
    draft = draft_config(target.config, recipe.draft, boundaries=_boundaries(context, target), draft_vocab_size=size)
    reasons = {form: unsupported(draft, target.config.architecture, form) for form in recipe.export.formats}
    if problems := [reason for reason in reasons.values() if reason]:
        rest = [form for form, reason in reasons.items() if not reason]
        other = f"Set export.formats to [{', '.join(rest)}]" if rest else "Export for another engine"
        return failed("target.draft", "; ".join(problems), f"{other}, or change the draft.")
    rope = f"RoPE {draft.rope_parameters['rope_type']} at {draft.rope_parameters['rope_theta']:g}"
    vocabulary = f"at most {size:,} of {rows:,} tokens"
    return passed("target.draft", f"{draft.aux} aux states, MLP {draft.intermediate_size}, {rope}, {vocabulary}, for {', '.join(reasons)}")


def target_tokenizer(context: GateContext) -> Finding:
    """The tokenizer loads, fits under the LM head, has a chat template and a stop token that engines know."""
    from draftproof.target.tokenizer import closing_ids, load_tokenizer, stop_ids

    target = context.target
    if target is None:
        return _no_target("target.tokenizer")
    tokenizer = load_tokenizer(target)  # also proves the chat template
    rows = target.config.vocab_size
    stops = stop_ids(tokenizer, target)
    plain = {token: index for token, index in tokenizer.get_vocab().items() if index >= rows}
    added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if index >= rows}
    beyond = sorted(set(plain) - set(added)) or [str(stop) for stop in stops if stop >= rows]
    if beyond:
        return failed(
            "target.tokenizer",
            f"{len(beyond)} token(s), for example {beyond[0]!r}, have ids beyond the LM head's {rows} rows",
            "Use the tokenizer that belongs to these weights.",
        )
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(stop)} ({stop})" for stop in stops)
    evidence = f"{len(tokenizer)} tokens for {rows} head rows, chat template present, answers end with {names}"
    if added:
        return warned(
            "target.tokenizer",
            f"{evidence}; added token {next(iter(added))!r} has an id beyond the LM head",
            "Rows that hold it are refused; usually it stands for images only.",
        )
    if silent := set(closing_ids(tokenizer)) - _declared_stops(target, tokenizer.eos_token_id):
        return warned(
            "target.tokenizer",
            f"{evidence}; the chat template closes answers with {sorted(silent)}, which no config declares as eos",
            "Add it to eos_token_id in generation_config.json, or engines will not stop there.",
        )
    return passed("target.tokenizer", evidence)


def target_remote_code(context: GateContext) -> Finding:
    """Code that comes with the target runs only when the recipe says so, and then it is named by hash."""
    target = context.target
    if target is None:
        return _no_target("target.remote_code")
    code = code_files(target.folder)
    named = ", ".join(f"{name} {digest[:12]}" for name, digest in sorted(code.items()))
    mapped = {key: value for key, value in _auto_map(target).items() if value}
    elsewhere = sorted({str(value) for value in mapped.values() if "--" in str(value)})
    if target.settings.trust_remote_code:
        if elsewhere:
            return failed(
                "target.remote_code",
                f"the code to run is not in the folder but in another repository ({elsewhere[0]}), so nobody can say what would run",
                "Copy that repository's .py files into the target folder and mend auto_map.",
            )
        return passed(
            "target.remote_code", f"trusted by the recipe; runs {named}" if code else "trusted by the recipe; there is no code to run"
        )
    if mapped and not _built_in(target):
        return failed(
            "target.remote_code",
            f"model type {target.config.model_type!r} needs code that comes with the target ({named or elsewhere[0]})",
            "Read that code, then set target.trust_remote_code: true.",
        )
    return passed(
        "target.remote_code",
        f"not trusted, not needed; {len(code)} code file(s) in the folder stay unused" if code else "no code in the folder",
    )


def _no_target(check: str) -> Finding:
    return unsure(check, "the target was not opened", "Check target.model.")


def _boundaries(context: GateContext, target: Target) -> tuple[int, ...]:
    layers, written = target.config.layers, context.recipe.extract.boundaries
    return check_boundaries(default_boundaries(layers) if written is None else written, layers)


def _listed(problems: list[str], shown: int = 5) -> str:
    more = f" (and {len(problems) - shown} more)" if len(problems) > shown else ""
    return " ".join(problems[:shown]) + more


def _declared_stops(target: Target, tokenizer_eos: int | None) -> set[int]:
    """Ends of answers that the target's files state, without the template."""
    stops = set() if tokenizer_eos is None else {tokenizer_eos}
    path = target.folder / "generation_config.json"
    eos = read_json_file(path).get("eos_token_id") if path.is_file() else None
    return stops | set(eos if isinstance(eos, list) else [] if eos is None else [eos])


def _auto_map(target: Target) -> dict[str, object]:
    """What the folder's JSON files want to run: class to `file.Class`."""
    wanted: dict[str, object] = {}
    for name in ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        path = target.folder / name
        found = read_json_file(path).get("auto_map") if path.is_file() else None
        if isinstance(found, dict):
            wanted |= {f"{name} {key}": value for key, value in found.items()}
    return wanted


def _built_in(target: Target) -> bool:
    """Whether transformers has classes of its own for this config and, where mapped, needs nobody else's tokenizer."""
    from transformers import CONFIG_MAPPING

    outer = read_json_file(target.folder / "config.json").get("model_type")
    own_tokenizer = any(key.startswith("tokenizer_config.json") for key in _auto_map(target))
    return outer in CONFIG_MAPPING and not own_tokenizer
