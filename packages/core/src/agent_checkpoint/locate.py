"""Which store a command means, when it is not told.

``--db``, then AGENT_CHECKPOINT_DB, then the nearest ``.agent-checkpoint/state.db``
upwards (a git worktree finds its main checkout's), else that path here.
"""

from __future__ import annotations

import os

from agent_checkpoint.errors import ForeignStoreError, StorageUnreachableError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VARIABLE = "AGENT_CHECKPOINT_DB"
RELATIVE = os.path.join(".agent-checkpoint", "state.db")


def locate(given: str | None, environ: Mapping[str, str]) -> str:
    """The path or URL of the store.

    Raises:
        ForeignStoreError: the nearest store upwards belongs to another user.
    """
    named = given if given is not None else environ.get(VARIABLE) or None
    if named is not None:
        return named
    try:
        here = os.getcwd()
    except OSError as error:
        raise StorageUnreachableError(f"the working directory cannot be read: {error.strerror}") from error
    for folder in _upwards(here):
        path = os.path.join(folder, RELATIVE)
        try:
            owner = os.stat(path).st_uid
        except OSError:
            continue
        if owner != os.geteuid():
            raise ForeignStoreError(
                f"{path} was found upwards of here, and belongs to user {owner}, not to you ({os.geteuid()})",
                database=path,
                owner_uid=owner,
            )
        return path
    return os.path.join(here, RELATIVE)


def _upwards(folder: str) -> Iterator[str]:
    while True:
        yield folder
        main = _main_checkout(folder)
        if main is not None:
            yield main
        parent = os.path.dirname(folder)
        if parent == folder:
            return
        folder = parent


def _main_checkout(folder: str) -> str | None:
    """The main checkout of a git worktree: its ``.git`` is a file that names the shared repository."""
    try:
        with open(os.path.join(folder, ".git"), encoding="utf-8") as link:
            key, _, where = link.read(4096).partition(":")
        if key != "gitdir":
            return None
        private = os.path.join(folder, where.strip())
        with open(os.path.join(private, "commondir"), encoding="utf-8") as common:
            shared = os.path.normpath(os.path.join(private, common.read(4096).strip()))
    except (OSError, ValueError):
        return None
    return os.path.dirname(shared) if os.path.basename(shared) == ".git" else None
