"""An agent that prepares a page and publishes it, under a lease."""

from __future__ import annotations

from pathlib import Path

from agent_checkpoint import StateStore


def prepare() -> str:
    """What takes long: a build, the answer of a model."""
    return "hello\n"


def run(db: Path, page: Path) -> None:
    """Prepare the page and publish it."""
    with StateStore(db) as store, store.hold("release", "my-agent") as held:
        store.put_checkpoint("page", {"stage": "preparing"}, lease=held)
        text = prepare()
        held.check()  # before what cannot be undone
        page.write_text(text)
        store.put_checkpoint("page", {"stage": "published"}, lease=held)
