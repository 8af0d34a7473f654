"""``python -m tests.faults --minutes N``: every proof in one run, then a table of what it saw.

Each engine gets its share of the time on the right store, then every store that
is broken on purpose is given to the engines that must catch it. The status is 1
when a promise was broken, or a broken store was not caught.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from tests.faults import table
from tests.faults.engine import Budget, Engine, Report
from tests.faults.table import Ran

# The share of the time that each engine has on the right store; what is left is for the broken ones.
SHARES = {"model": 0.25, "histories": 0.4, "disks": 0.15, "fuzz": 0.05, "flips": 0.05}
# Who must catch what; an engine that is to see a fault first is named first.
CATCHES = {
    "model": (
        "no-fence-check",
        "token-reset-on-release",
        "the-contenders-ttl",
        "wall-clock",
        "no-death-check",
        "refusal-before-its-commit",
        "pid-alone",
    ),
    "histories": ("no-fence-check", "check-in-another-transaction", "token-reset-on-release"),
    "disks": ("unsynced-grants", "commit-errors-swallowed", "lost-answers-are-failures"),
    "fuzz": ("unchecked-values",),
    "flips": ("unverified-sums",),
}
# Seconds that a broken store may need at the worst; it is caught in a few.
LONGEST_CATCH = 60.0
ENDURANCE_MINUTES = 30.0
INTERRUPTED = 130


def main(words: list[str] | None = None) -> int:
    """Run what was asked for, print the table; 0 when everything held."""
    options = _arguments(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    print(f"seed {options.seed}", flush=True)
    ran: list[Ran] = []
    runs = [("endurance", options.minutes * 60, None)] if options.endurance else _everything(options)
    try:
        for name, seconds, variant in runs:
            ran.append(_run(name, seconds, options.seed, variant))
    except KeyboardInterrupt:
        print(f"interrupted; so far, with seed {options.seed}:", file=sys.stderr)
        print(table.of(ran))
        return INTERRUPTED
    print(table.of(ran))
    if options.json:
        options.json.write_text(json.dumps(table.document(options.seed, ran), indent=2) + "\n")
    return 0 if all(each.held for each in ran) else 1


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="What the store survives, shown.")
    parser.add_argument(
        "--minutes",
        type=_minutes,
        metavar="N",
        help="how long the right store has (5, or 30 with --endurance); the broken ones take some seconds each",
    )
    parser.add_argument("--only", action="append", choices=SHARES, metavar="ENGINE", help=f"of {', '.join(SHARES)}")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="to see a run again")
    parser.add_argument("--no-variants", action="store_true", help="the right store alone")
    parser.add_argument("--endurance", action="store_true", help="everything in one file for long: does it grow?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what the table says to FILE")
    options = parser.parse_args(words)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"argument --json: there is no folder {options.json.parent}")
    options.minutes = options.minutes or (ENDURANCE_MINUTES if options.endurance else 5.0)
    return options


def _minutes(word: str) -> float:
    try:
        minutes = float(word)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of minutes, more than 0, not {word!r}")
    return minutes


def _everything(options: argparse.Namespace) -> Iterator[tuple[str, float, str | None]]:
    """What is to run, for how many seconds, on which store."""
    seconds = options.minutes * 60
    chosen = [name for name in SHARES if not options.only or name in options.only]
    together = sum(SHARES[name] for name in chosen) / (1 if options.no_variants else sum(SHARES.values()))
    for name in chosen:
        yield name, seconds * SHARES[name] / together, None
    if not options.no_variants:
        for name in chosen:
            for variant in CATCHES.get(name, ()):
                yield name, LONGEST_CATCH, variant


def _run(name: str, seconds: float, seed: int, variant: str | None) -> Ran:
    engine: Engine = import_module(f"tests.faults.{name}.engine").run
    started = time.monotonic()
    title = name if variant is None else f"{name}: {variant}"
    with _progress(title, seconds) as tell:
        try:
            report = engine(Budget(seconds, seed, stop_early=variant is not None), tell, variant)
        except Exception:
            # What the others found must not go with it; and a crash catches no broken store.
            report = Report(violations=[f"the engine itself crashed, seed {seed}:\n{traceback.format_exc()}"])
    return Ran(name, variant, report, time.monotonic() - started)


@contextmanager
def _progress(title: str, seconds: float) -> Iterator[Callable[[Report], object]]:
    """A line about what is going on: rewritten on a terminal, now and then in a log."""
    live = sys.stderr.isatty()
    every = 0.5 if live else 10.0
    started = said = time.monotonic()

    def tell(report: Report) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= every:
            said = now
            line = f"{title}: {now - started:.0f} of {seconds:.0f} s, {table.counted(report)}"
            print(f"\r\033[K{line}" if live else line, end="" if live else "\n", file=sys.stderr, flush=True)

    yield tell
    if live:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
