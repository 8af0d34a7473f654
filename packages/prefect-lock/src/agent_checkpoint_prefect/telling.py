"""Telling Prefect: events of leases for its event feed, and lines in the run's log.

Events are sent by a thread of their own, after the fact; nobody waits for it,
and what fails is dropped: core's audit log is the record. Outside of a run and
without an API url nothing is sent, since Prefect would start a server for it,
and neither to an API that does not answer: Prefect would wait for it at the end
of the process.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from contextvars import copy_context
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from agent_checkpoint_prefect.context import in_a_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_checkpoint_prefect.leases import FencedLease

# Events that wait to be sent; more are dropped.
MOST_WAITING = 1_000

_waiting: queue.Queue[Callable[[], object]] = queue.Queue(MOST_WAITING)
_starting = threading.Lock()
_sender: threading.Thread | None = None
# An API that was asked whether it answers is not asked again for so long.
TRUST_SECONDS = 30.0
_answered: tuple[float, bool] = -math.inf, False


def logger() -> Any:
    """The logger of the run, or of this package outside of one."""
    if in_a_run():
        from prefect.exceptions import MissingContextError
        from prefect.logging import get_run_logger

        try:
            return get_run_logger()
        except MissingContextError:
            pass
    return logging.getLogger("agent_checkpoint_prefect")


def tell(kind: str, lease: FencedLease, **more: Any) -> None:
    """Have Prefect hear of a lease: ``agent-checkpoint.lease.<kind>``."""
    if not (in_a_run() or _has_api()):
        return
    event = {
        "occurred": datetime.now(timezone.utc),
        "event": f"agent-checkpoint.lease.{kind}",
        "resource": {
            "prefect.resource.id": f"agent-checkpoint.lease.{lease.scope}",
            "prefect.resource.name": lease.name,
        },
        "payload": {"scope": lease.scope, "token": lease.token, "slot": lease.slot, "owner": lease.owner, **more},
    }
    context = copy_context()
    try:
        _waiting.put_nowait(lambda: context.run(_send, event))
    except queue.Full:
        return
    _start()


def _has_api() -> bool:
    if os.environ.get("PREFECT_API_URL"):
        return True
    from prefect.settings import get_current_settings

    return get_current_settings().api.url is not None


def _send(event: dict[str, Any]) -> None:
    # Not by emit_event, which logs what fails as an error: nobody would know what to do about it.
    from prefect.events import Event
    from prefect.events.worker import EventsWorker

    if in_a_run() or _answers():
        EventsWorker.instance().send(Event(**event))


def _answers() -> bool:
    global _answered
    from prefect.client.orchestration import get_client

    asked_at, answers = _answered
    if time.monotonic() > asked_at + TRUST_SECONDS:
        with get_client(sync_client=True) as client:
            answers = client.api_healthcheck() is None
        _answered = time.monotonic(), answers
    return answers


def _start() -> None:
    global _sender
    with _starting:
        if _sender is None or not _sender.is_alive():
            _sender = threading.Thread(target=_send_all, name="agent-checkpoint-prefect-events", daemon=True)
            _sender.start()


def _send_all() -> None:
    while True:
        send = _waiting.get()
        try:
            if threading.main_thread().is_alive():  # at its end the interpreter starts no thread for Prefect any more
                send()
        except Exception:
            logging.getLogger("agent_checkpoint_prefect").debug("an event could not be sent", exc_info=True)


def _begin_in_child() -> None:
    global _waiting, _starting, _sender
    _waiting, _starting, _sender = queue.Queue(MOST_WAITING), threading.Lock(), None


os.register_at_fork(after_in_child=_begin_in_child)
