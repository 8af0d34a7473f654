"""``once``: a command that is run once for a key, however often it is asked for.

It runs under a lease: the environment's, where there is one, else one of its
own, as ``run`` would hold it. In that case this program is started once more,
as the command that ``run`` supervises.
"""

from __future__ import annotations

import base64
import os
import sys
from fcntl import ioctl
from functools import partial
from select import select
from termios import FIONREAD

from agent_checkpoint import names
from agent_checkpoint.cli import environment, output, supervised
from agent_checkpoint.cli.opening import store
from agent_checkpoint.cli.parser import Answer, Command, integer, wait_seconds
from agent_checkpoint.effects import idempotency_key
from agent_checkpoint.errors import EffectUnknownError, InvalidInputError, NotFoundError, StorageError
from agent_checkpoint.rules.effect import to_resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterator
    from subprocess import Popen
    from typing import Any

    from agent_checkpoint.acting import Acting
    from agent_checkpoint.records import Fence
    from agent_checkpoint.store import StateStore

# What is kept of a command's output.
MOST_BYTES = 1024 * 1024
# What is read of it at once, and seconds between two looks whether the command has ended.
CHUNK_BYTES = 65_536
LOOK_SECONDS = 0.05
CANNOT_EXECUTE, NOT_FOUND = 126, 127
# Of a store that takes nothing; it may have been deleted, too.
UNWRITABLE = (StorageError, NotFoundError)
# This program, whatever lies in the working directory.
AGAIN = "import sys; '' in sys.path and sys.path.remove(''); from agent_checkpoint.cli import script; script()"


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("key", metavar="KEY", help="what names the action: it is done once for it, for ever")
    parser.add_argument(
        "--scope", metavar="SCOPE", help="whose lease to run under (the environment's, else effect/KEY)"
    )
    parser.add_argument("--owner", help="who asks, where it takes a lease of its own (the machine and the process)")
    parser.add_argument("--ttl", metavar="SECONDS", help="seconds that lease lasts without a heartbeat (30)")
    parser.add_argument("--wait", metavar="SECONDS|forever", help="seconds to queue for it (forever)")
    parser.add_argument("--no-wait", action="store_true", help="exit 75 at once when another is at it")
    parser.add_argument("--request", metavar="TEXT", help="what is asked for: the same key with another one is refused")
    parser.add_argument("--result-file", metavar="FILE", help="the result is in FILE, not in the command's output")
    parser.add_argument(
        "--not-done-status", metavar="N,…", default="", help="exit statuses that say that surely nothing was done"
    )
    parser.add_argument("--init", action="store_true", help="create the store if there is none")


def _once(arguments: Namespace) -> Answer:
    if arguments.field is not None:
        raise InvalidInputError("field: once prints the result and nothing else", field="field")
    if not arguments.command:
        raise InvalidInputError(
            "command: is missing; give it behind '--'", field="command", hint="agent-checkpoint once KEY -- ./pay.sh"
        )
    if arguments.result_file is not None:
        names.path("result_file", arguments.result_file)
    not_done = _statuses(arguments.not_done_status)
    opened = store(arguments)
    if arguments.init:
        opened.initialize()
    fence = _held(opened, arguments.scope)
    if fence is not None:
        return Answer(None, status=_act(opened, fence, arguments, not_done), silent=True)
    known = opened.get_effect(arguments.key)
    if known is not None and known.state == "done" and arguments.request is None:
        return Answer(None, status=_tell(known.result), silent=True)  # nobody need be waited for
    opened.close()  # what is to be forked shares no database
    return Answer(None, status=_under_a_lease(store(arguments), arguments), silent=True)


def _held(opened: StateStore, scope: str | None) -> Fence | None:
    """The environment's lease to run under."""
    fences = [each for each in environment.held(opened, os.environ) if scope in (None, each.scope)]
    return fences[-1] if fences else None


def _under_a_lease(opened: StateStore, arguments: Namespace) -> int:
    """Run this program again, as a command that ``run`` supervises."""
    again = [sys.executable, "-c", AGAIN, "once"]
    for name in ("request", "result_file", "busy_timeout"):
        value = getattr(arguments, name)
        again += [] if value is None else [f"--{name.replace('_', '-')}={value}"]
    key = ["--", arguments.key] if arguments.key.startswith("-") else [arguments.key]
    again += [f"--not-done-status={arguments.not_done_status}", *key, "--", *arguments.command]
    wait = "0" if arguments.no_wait else arguments.wait or "forever"
    wait_seconds(wait, 0.0)
    for name, value in {
        "scope": _scope(arguments.key) if arguments.scope is None else arguments.scope,
        "wait": wait,
        "limit": None,
        "grace": None,
        "on_lost": "term",
        "if_held": "fail",
        "command": again,
    }.items():
        setattr(arguments, name, value)
    return supervised.hold(arguments, opened, supervised.Report(None))


def _scope(key: str) -> str:
    """The scope of a key that has none: its own, be the key as long as it may."""
    scope = f"effect/{key}"
    return scope if len(scope.encode()) <= names.MAX_NAME_BYTES else f"effect/{idempotency_key(key)}"


def _act(opened: StateStore, fence: Fence, arguments: Namespace, not_done: frozenset[int]) -> int:
    with opened.effect(arguments.key, lease=fence, request=arguments.request) as effect:
        if not effect.fresh:
            return _tell(effect.result)
        try:
            child = _start(arguments.command)
        except OSError as error:
            return _not_started(effect, arguments.command[0], error)
        status, kept = _follow(child)
        if status == 0:
            _done(effect, kept, arguments.result_file)
        elif status in not_done:
            said = f"the command exited with status {status}: {effect.key!r} surely did not happen"
            _record(effect.failed, effect, said, "--retry")
        else:
            _leave(effect, status)
        return status


def _start(command: list[str]) -> Popen[bytes]:
    """Start the command; an ``OSError`` says that surely none of it was run."""
    from subprocess import PIPE, Popen

    return Popen(command, stdout=PIPE)  # noqa: S603 -- what we were asked to run


def _follow(child: Popen[bytes]) -> tuple[int, bytes]:
    """Pass its output on as it comes: its status, as a shell would say it, and what is kept."""
    assert child.stdout is not None
    kept = bytearray()
    with child.stdout as pipe:
        for chunk in _output_of(child, pipe.fileno()):
            kept += chunk[: MOST_BYTES + 1 - len(kept)]
            _pass_on(chunk)
    status = child.wait()
    return (status if status >= 0 else 128 - status), bytes(kept)


def _output_of(child: Popen[bytes], pipe: int) -> Iterator[bytes]:
    """What the command writes until it ends: what it leaves running may keep the pipe open for ever."""
    while child.poll() is None:
        if not select([pipe], [], [], LOOK_SECONDS)[0]:
            continue
        chunk = os.read(pipe, CHUNK_BYTES)
        if not chunk:
            return
        yield chunk
    left = int.from_bytes(ioctl(pipe, FIONREAD, bytes(4)), sys.byteorder)
    while left and (chunk := os.read(pipe, min(left, CHUNK_BYTES))):
        left -= len(chunk)
        yield chunk


def _pass_on(chunk: bytes) -> None:
    """To stdout, as long as somebody reads: the command goes on, and its result is kept."""
    if sys.stdout is None:
        return
    try:
        output.pour(chunk)
    except OSError:
        output.silence(sys.stdout)


def _not_started(effect: Acting, command: str, error: OSError) -> int:
    """Surely nothing was done: the status, as a shell would say it."""
    said = f"cannot execute {command!r}: {error.strerror}"
    _record(effect.failed, effect, f"{said}; {effect.key!r} surely did not happen", "--retry")
    missing = isinstance(error, FileNotFoundError)
    output.warn("command-not-found" if missing else "command-cannot-execute", said)
    return NOT_FOUND if missing else CANNOT_EXECUTE


def _done(effect: Acting, kept: bytes, path: str | None) -> None:
    """Record that it happened, and its result; that it happened also where there is none.

    Raises:
        EffectUnknownError: it could not be recorded.
        StorageError: it is recorded, without the result, which cannot be read from ``path``.
    """
    unread: OSError | None = None
    if path is not None:
        try:
            with open(path, "rb") as source:
                kept = source.read(MOST_BYTES + 1)
        except OSError as error:
            unread = error
    said = f"the command exited with status 0: {effect.key!r} is done"
    _record(partial(effect.done, None if unread else _result(kept)), effect, said, "--done")
    if unread is not None:
        raise StorageError(
            f"{said}, but its result cannot be read from {path!r}: {unread.strerror}",
            hint="it is on record without a result, and is not done again",
        )


def _leave(effect: Acting, status: int) -> None:
    """Say that nobody knows whether it happened; on record, where the store takes it: a begun one is unknown too."""
    output.warn(
        "effect-unknown",
        f"the command exited with status {status}: whether {effect.key!r} happened is not known; look, "
        f"then: {to_resolve(effect.key)}",
    )
    try:
        effect.leave(f"the command exited with status {status}")
    except UNWRITABLE:
        effect.fresh = False  # nothing is left to tell


def _record(tell: Callable[[], object], effect: Acting, said: str, decision: str) -> None:
    """Tell what became of it; where the store does not take that, say what is known here and nowhere else.

    Raises:
        EffectUnknownError: it is not on record.
    """
    try:
        tell()
    except UNWRITABLE as error:
        effect.fresh = False  # the store is not asked once more: whoever is to hear of this need not wait for that
        raise EffectUnknownError(
            f"{said}, but that could not be recorded: {error}",
            hint=f"when the store can be written again: {_to_decide(effect.key, decision)}",
            key=effect.key,
            **effect.fence._asdict(),
            cause=error.code,
        ) from error


def _to_decide(key: str, decision: str) -> str:
    """The command that resolves it, where only one decision is right."""
    return to_resolve(key).removesuffix(" (or --retry)").replace("--done", decision, 1)


def _result(kept: bytes) -> dict[str, Any]:
    """The output as JSON."""
    truncated, kept = len(kept) > MOST_BYTES, kept[:MOST_BYTES]
    try:
        return {"output": kept.decode(), "truncated": truncated}
    except UnicodeDecodeError:
        return {"output_base64": base64.b64encode(kept).decode(), "truncated": truncated}


def _tell(result: Any) -> int:
    """Print a recorded result: the output byte for byte, other results as JSON."""
    kept = _output(result)
    if kept is not None:
        printed = kept
    elif result is not None:
        import json

        printed = (json.dumps(result, indent=2, sort_keys=True) + "\n").encode()
    else:
        printed = b""
    if printed:
        output.write_bytes(printed)
    if kept is not None and result["truncated"]:
        output.warn("output-truncated", f"no more of the output was kept than its first {MOST_BYTES} bytes")
    return 0


def _output(result: Any) -> bytes | None:
    """The output that a result of ours holds; None for what somebody else has recorded."""
    if not isinstance(result, dict) or len(result) != 2 or not isinstance(result.get("truncated"), bool):
        return None
    try:
        if "output" in result:
            return str.encode(result["output"])
        return base64.b64decode(result["output_base64"], validate=True)
    except (KeyError, TypeError, ValueError):
        return None


def _statuses(text: str) -> frozenset[int]:
    found = set()
    for part in filter(None, text.split(",")):
        status = integer("not_done_status", part.strip())
        if status is None or not 1 <= status <= 255:
            raise InvalidInputError("not_done_status: must be exit statuses from 1 to 255", field="not_done_status")
        found.add(status)
    return frozenset(found)


COMMANDS = {
    "once": Command(
        "Run a command once for a key; later calls print its result.", _arguments, _once, takes_command=True
    )
}
