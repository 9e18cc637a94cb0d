"""What went wrong when a machine gave no document: ssh's, sudo's or Python's own words, and what to do."""

from __future__ import annotations

import re
import signal

from draftproof.errors import Undecided, printable
from draftproof.machine.child import BEGIN, MOST_OUTPUT, Ended


class Unreachable(Undecided):
    """A machine could not be asked, so nothing is known about it."""


def explain(host: str | None, python: str, ended: Ended, timeout_s: float) -> Unreachable:
    """Why there is no document of a host (None: this machine), whose script `python` was to run."""
    by_hand = f"Try `ssh {host} true` by hand." if host else "Look at `dmesg`: a driver call may hang."
    says = _last_line(ended.stderr)
    first = _first_line(ended.stdout) or _first_line(ended.stderr.encode())

    def because(what: str, remedy: str) -> Unreachable:
        return Unreachable(what, where=host or "this machine", remedy=remedy)

    if ended.how == "interrupted":
        return because("Asking was interrupted.", "Ask again.")
    if ended.how == "could not start":
        return because(f"A program is missing here: {ended.stderr}.", "Install it (Debian: apt-get install openssh-client).")
    if ended.how == "timed out":
        return because(f"No answer within {timeout_s:g} s{f'; it said {says!r}' if says else ''}.", by_hand)
    if ended.how == "said too much":
        return because(
            f"It printed more than {MOST_OUTPUT // 2**20} MiB, beginning with {first!r}.", "Find what prints there: a login script?"
        )
    if host is not None and ended.code == 255:
        for pattern, remedy in _SSH_SAYS:
            if re.search(pattern, ended.stderr):
                return because(_by_ssh(says), remedy.format(host=host))
        return because(_by_ssh(says or "the connection ended without a word, or the script was killed there"), by_hand)
    if ended.code == 127:
        return because(f"There is no {python} there: {says}", "Install Python 3.9 or newer there, or give the path of one.")
    if ended.code == 126:
        return because(f"{python} cannot be run there: {says}", "Give the path of another Python, 3.9 or newer.")
    if re.search(r"SyntaxError|Unknown option: -I|'type' object is not subscriptable", ended.stderr):
        return because(f"{python} is too old there: {says}", "Python 3.9 or newer is needed: give the path of one.")
    number = -ended.code if ended.code is not None and ended.code < 0 else (ended.code or 0) - 128
    if 0 < number < signal.NSIG:
        return because(f"The script was killed by {_signal_name(number)}.", "Look at `dmesg` there: was memory short?")
    if "Traceback (most recent call last)" in ended.stderr:
        return because(f"The script failed there: {says}", "This is a fault of ours: please report it with the whole output.")
    return because(
        f"It answered with exit code {ended.code} and no document{f'; the first line was {first!r}' if first else ''}.",
        "A login script or a forced command may end the session or swallow its output: keep it silent for sessions without a terminal.",
    )


def sudo_refusal(ended: Ended) -> str | None:
    """sudo's own words if it did not let the script start."""
    if ended.how == "could not start" and ended.stderr.startswith("sudo:"):
        return ended.stderr
    if ended.how != "ended" or ended.code not in (1, 126, 127) or BEGIN in ended.stdout:
        return None
    match = _SUDO.search(ended.stderr)
    return _clean(match.group()) if match else None


_SUDO = re.compile(
    r"^(?:sudo(?:-rs)?: .*|Sorry, user .*|.* is not in the sudoers file.*|.* may not run sudo.*|env: .*\bsudo\b.*)$", re.MULTILINE
)

_SSH_SAYS: tuple[tuple[str, str], ...] = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed",
        "Its host key is another than last time: find out why before anything else; then connect once by hand with `ssh {host}`.",
    ),
    (
        r"Host key verification failed|host key is known for",
        "Its host key is not known here: connect once by hand with `ssh {host}` and compare the fingerprint.",
    ),
    (
        r"Permission denied|Too many authentication failures|no mutual signature",
        "No key was accepted: load one with ssh-add or name it in your ssh config, until `ssh -o BatchMode=yes {host} true` works.",
    ),
    (r"Could not resolve hostname", "Check the name, or give it a HostName in your ssh config."),
    (r"Connection refused", "No ssh server listens there: check host and port."),
    (r"timed out|Timeout, server", "It does not answer on the network: check that it is up, and that you are in its network or VPN."),
    (r"No route to host|Network is unreachable", "Check that it is up, and that you are in its network or VPN."),
    (r"[Cc]onnection (?:closed|reset)|Broken pipe|kex_exchange_identification", "It hung up: its ssh server's log says why."),
    (r"Bad owner or permissions|[Bb]ad configuration option", "Mend your ssh config; `ssh -G {host}` reads it."),
)


def _by_ssh(words: str) -> str:
    return words if words.startswith("ssh: ") else f"ssh: {words}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_line(output: bytes) -> str:
    return next((_clean(line.decode(errors="replace")) for line in output[: 2**12].splitlines() if line.strip()), "")


def _last_line(text: str) -> str:
    return next((_clean(line) for line in reversed(text.splitlines()) if line.strip()), "")


def _clean(line: str) -> str:
    """One line for a terminal of ours: no control characters, no end of its own, not endless."""
    return printable(line.strip())[:300].rstrip(".")
