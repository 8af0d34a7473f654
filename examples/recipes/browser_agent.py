"""An agent that works through the pages of a shop and places one order. It may be killed, and started twice.

    python browser_agent.py ORDER

The browser is played by a file; put Playwright, or a model that drives it, in
its place. What the agent has filled in so far is in its checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from agent_checkpoint import Effect, Resolution, StateStore

PAGES = ("sign in", "choose a seat", "enter the address")
ORDER = {"seat": "12A", "address": "1 Main Street"}


class Shop:
    """Somebody else's system: it takes every order, and can be asked which it has."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def order(self, reference: str, what: dict[str, str]) -> str:
        with self._file.open("a") as orders:
            orders.write(json.dumps({"reference": reference, **what}) + "\n")
        return f"ticket {reference[:8]}"

    def has(self, reference: str) -> bool:
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return any(json.loads(line)["reference"] == reference for line in lines)


def work(store: StateStore, shop: Shop, order: str) -> str:
    """Go through the pages that are left, then order; the ticket."""

    def look_into_the_account(effect: Effect) -> Resolution:
        reference = effect.idempotency_key
        return Resolution(True, f"ticket {reference[:8]}") if shop.has(reference) else Resolution(False)

    with store.hold(f"browser/{order}", f"agent-{os.getpid()}", wait_seconds=600) as lease:
        saved = store.get_checkpoint(f"browser/{order}")
        filled = list(saved.data["pages"]) if saved else []
        for page in PAGES[len(filled) :]:
            lease.check()  # a tab that outlived its lease clicks no more
            filled.append(page)
            store.put_checkpoint(f"browser/{order}", {"pages": filled}, lease=lease)
        with lease.effect(f"order {order}", request=ORDER, resolve=look_into_the_account) as effect:
            if effect.fresh:
                effect.done(shop.order(effect.idempotency_key, ORDER))
            return str(effect.result)


if __name__ == "__main__":
    with StateStore("agents.db") as state:
        state.initialize()
        print(work(state, Shop(Path("orders.jsonl")), sys.argv[1]))  # noqa: T201 -- a program
