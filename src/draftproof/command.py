"""How every command ends: with one sentence on stderr, one JSON document if asked for, and an exit code.

with command("inspect", as_json) as result:
    result.update(kind="store")
    result.say("a store of 3 shards")
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof import __version__

RecipeFile = Annotated[Path, typer.Argument(help="The recipe, a YAML file.", metavar="RECIPE")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Values that replace the recipe's: train.unroll=5", metavar="[KEY=VALUE ...]")]
Workdir = Annotated[str | None, typer.Option("--workdir", help="Run folder, instead of the recipe's run.dir.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress, no gates; errors only.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Every finding of every gate.")]


class Result(dict[str, Any]):
    """The JSON document of a command, and its lines for people."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self.as_json = as_json

    def say(self, line: str) -> None:
        """A line on stdout, unless the document goes there."""
        if not self.as_json:
            typer.echo(line)


@contextmanager
def command(name: str, as_json: bool) -> Iterator[Result]:
    """Turn what a command raises into one sentence, a document and an exit code."""
    result = Result(as_json)
    status, code, message = "ok", 0, ""
    received: list[int] = []

    def stop(number: int, frame: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt  # not an Exception, so that nothing on its way takes it for an error of its own

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell starts its background jobs deaf to Ctrl-C
            signal.signal(number, stop)
    try:
        yield result
    except BrokenPipeError:
        raise
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001  the last door: said in one sentence, never swallowed
        status, code, message = _explain(error, received)
    _report(result, name, status, code, message)
    if code:
        raise typer.Exit(code)


def _explain(error: BaseException, received: list[int]) -> tuple[str, int, str]:
    """Status, exit code and sentence of what ended a command. `received`: signals, whatever came of them on the way."""
    from draftproof.errors import DraftproofError

    if received or isinstance(error, KeyboardInterrupt):
        by_term = signal.SIGTERM in received
        return "stopped", 5 if by_term else 130, f"{'Stopped by SIGTERM' if by_term else 'Interrupted'}. {_GO_ON}"
    if isinstance(error, DraftproofError):
        return error.status, error.exit_code, str(error)
    if logging.getLogger("draftproof").isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" [{error.filename}]" if error.filename else ""
        return "failed", 1, f"The system refused: {error.strerror}.{where} Mend that and run the same command again."
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        "failed",
        1,
        f"{type(error).__name__}: {error} [{Path(place.filename).name}:{place.lineno}] "
        "This is a fault of draftproof, not of your input; -v shows the whole trace.",
    )


_GO_ON = "Run the same command again to go on from here."


_STEERING = re.compile(r"[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Letters that JSON leaves as they are, and that terminals take for orders."""


def _report(result: Result, name: str, status: str, code: int, message: str) -> None:
    """The sentence in one line on stderr, the document on stdout."""
    from draftproof.errors import printable

    message = printable(" ".join(message.split()))
    if message:
        typer.echo(f"{status}: {message}", err=True)
    if result.as_json:
        document = {"command": name, "version": __version__, "status": status, "exit_code": code, "message": message, **result}
        typer.echo(_STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(document, ensure_ascii=False, default=str)))


def refuse_arguments(error: Any) -> int:
    """A wrong command line, said as every other error: one sentence, and a document if one was asked for."""
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message(), err=True)
        return 2
    path = error.ctx.command_path if error.ctx is not None else "draftproof"
    message = f"{' '.join(error.format_message().split()).rstrip('.')}. `{path} --help` shows what it takes."
    name = path.removeprefix("draftproof").strip()
    _report(Result("--json" in sys.argv), name, "usage", 2, message)
    return 2
