"""Articles on their way from a draft to the site: as many workers as you like, each article published once.

    python content_pipeline.py ARTICLE...

Each article has a scope and a workflow of its own. The model may be asked by
two at a time, whoever they are. A worker that dies leaves its article to the
next one, which goes on behind the last stage.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from agent_checkpoint import Effect, HeldLease, LeaseHeldError, Resolution, StateStore

STAGES = ("outlined", "drafted", "edited")
AT_ONCE = 2
SITE = Path("site.txt")
WORKER = f"worker-{os.getpid()}"


def ask_the_model(article: str, stage: str) -> str:
    return f"{article}, {stage}"


def is_published(effect: Effect) -> Resolution:
    """Asked when a worker began to publish, and died: the site can tell."""
    lines = SITE.read_text().splitlines() if SITE.exists() else []
    return Resolution(effect.key.removeprefix("publish ") in lines)


def publish(article: str) -> None:
    with SITE.open("a") as site:
        site.write(f"{article}\n")


def bring_to_the_site(store: StateStore, article: str, lease: HeldLease) -> None:
    saved = store.get_checkpoint(f"article/{article}")
    texts = dict(saved.data) if saved else {}
    for stage in STAGES[len(texts) :]:
        with store.hold("model-api", WORKER, limit=AT_ONCE, wait_seconds=600):
            texts[stage] = ask_the_model(article, stage)
        store.put_checkpoint(f"article/{article}", texts, lease=lease)
    with lease.effect(f"publish {article}", resolve=is_published) as effect:
        if effect.fresh:
            publish(article)
            effect.done()


def work(store: StateStore, articles: list[str]) -> None:
    """Take whatever article nobody has; wait for none but those that somebody else is at."""
    taken = []
    for wait_seconds in (0, 600):
        for article in articles:
            if article in taken:
                continue
            try:
                with store.hold(f"article/{article}", WORKER, wait_seconds=wait_seconds) as lease:
                    bring_to_the_site(store, article, lease)
            except LeaseHeldError:
                continue
            taken.append(article)


if __name__ == "__main__":
    with StateStore("agents.db") as state:
        state.initialize()
        work(state, sys.argv[1:])
