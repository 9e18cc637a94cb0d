"""The reference pages, made from the code when the docs are built: what is written there cannot go stale.

A mkdocs hook: `reference/commands.md` from the Typer application, `reference/recipe.md` from the docstrings of
the recipe's Pydantic classes, `reference/exit-codes.md` from the error classes, `reference/check-document.md` from the
classes of what `check` prints.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from draftproof import errors
from draftproof.check import CheckDocument
from draftproof.cli import app
from draftproof.recipe import Recipe


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those that lie in docs/."""
    pages = {
        "commands": commands_page(),
        "recipe": recipe_page(),
        "exit-codes": exit_codes_page(),
        "check-document": check_page(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def commands_page() -> str:
    """Every command with its arguments and options."""
    lines = ["# Commands", "", "Made from the code. `draftproof COMMAND --help` prints the same.", ""]
    for name, command in _commands(typer.main.get_command(app), "draftproof"):
        lines += [f"## {name}", "", (command.help or "").strip(), "", f"    {_usage(name, command)}", ""]
        rows = [_parameter_row(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            lines += ["| | |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def recipe_page() -> str:
    """Every recipe key with its values, default and reason."""
    schema = Recipe.model_json_schema()
    intro = "Made from the code. An unknown key is refused with the nearest known one; `draftproof recipe show RECIPE` prints every value"
    lines = ["# Recipe keys", "", f"{intro} with where it came from.", ""]
    for section, field in schema["properties"].items():
        name = _reference(field)
        if name is None:
            continue
        part = schema["$defs"][name]
        lines += [f"## {section}", "", part.get("description", ""), ""]
        if field.get("description"):
            lines += [field["description"], ""]
        lines += ["| key | values | default | |", "|---|---|---|---|"]
        for key, value in part["properties"].items():
            default = f"`{_yaml(value['default'])}`" if "default" in value else "(needed)"
            lines.append(f"| `{section}.{key}` | {_values(value)} | {default} | {_cell(value.get('description', ''))} |")
        lines.append("")
    return "\n".join(lines)


def exit_codes_page() -> str:
    """Exit codes with the status that `--json` gives, from the error classes."""
    rows = {0: ("ok", "Done.")}
    kinds: list[type[errors.DraftproofError]] = [errors.DraftproofError, *errors.DraftproofError.__subclasses__()]
    for kind in kinds:
        rows.setdefault(kind.exit_code, (kind.status, (inspect.getdoc(kind) or "").split("\n\n")[0]))
    rows[130] = ("stopped", "Interrupted by Ctrl-C; running the same command again goes on from there.")
    lines = ["# Exit codes", "", "A promise to scripts.", "", "| code | status with `--json` | |", "|---|---|---|"]
    lines += [f"| {code} | `{status}` | {_cell(text)} |" for code, (status, text) in sorted(rows.items())]
    lines += [
        "",
        "With `--json` a command prints one document on stdout, and everything for people on stderr:",
        "",
        '    {"command": ..., "version": ..., "status": ..., "exit_code": ..., "message": ..., ...}',
        "",
    ]
    return "\n".join(lines)


def check_page() -> str:
    """What `draftproof check --json` prints, and its JSON schema."""
    schema = CheckDocument.model_json_schema()
    lines = ["# The document of check", "", "Made from the code; `draftproof check --schema` prints the schema alone.", ""]
    for name, part in {"CheckDocument": schema, **schema["$defs"]}.items():
        lines += [f"## {name}", "", part.get("description", ""), "", "| key | values | |", "|---|---|---|"]
        lines += [f"| `{key}` | {_values(value)} | {_cell(value.get('description', ''))} |" for key, value in part["properties"].items()]
        lines.append("")
    return "\n".join([*lines, "## JSON schema", "", "```json", json.dumps(schema, indent=1), "```", ""])


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _commands(inner, f"{path} {name}")
    else:
        yield path, command


def _usage(name: str, command: Any) -> str:
    arguments = [_metavar(parameter) for parameter in command.params if parameter.param_type_name == "argument"]
    return " ".join([name, *arguments, "[OPTIONS]"])


def _metavar(argument: Any) -> str:
    name = str(argument.metavar or argument.name.upper())
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _parameter_row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"| `{_metavar(parameter)}` | {_cell(getattr(parameter, 'help', None) or '')} |"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return f"| {names} | {_cell(parameter.help or '')} |"


def _reference(field: dict[str, Any]) -> str | None:
    """The class behind a section of the recipe."""
    for part in (field, *field.get("allOf", ()), *field.get("anyOf", ())):
        if "$ref" in part:
            return str(part["$ref"]).rpartition("/")[2]
    return None


def _values(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return f"[{(name := field['$ref'].rpartition('/')[2])}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(_values(part) for part in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    kind = str(field.get("type", ""))
    if kind == "array":
        return f"list of {_values(field.get('items', {}))}"
    if kind == "object":
        return "map"
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true`, `false`", "null": "`null`"}
    return words.get(kind, kind) + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {field[key]:g}" for key, sign in signs.items() if key in field]
    return f" ({', '.join(found)})" if found else ""


def _yaml(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
