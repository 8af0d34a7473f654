"""Blocking on the gate's lock without being stuck there: only who has to wait needs this."""

from __future__ import annotations

import errno
import time
from fcntl import LOCK_EX, LOCK_UN, lockf
from threading import Lock, Thread


class Helper:
    """A thread that blocks on the lock in place of a writer, who can then stop waiting."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # Used as signals: taken from the start, released once for each question and answer.
        self._asked = Lock()
        self._asked.acquire()
        self._answer = Lock()
        self._answer.acquire()
        self._state = Lock()
        self._wanted = False
        self._ended = False
        self.waiting = False
        Thread(target=self._serve, name="agent-checkpoint-gate", daemon=True).start()

    def take(self, patience: float) -> bool:
        """Wait for the lock; False when it did not come in time (it is then passed on)."""
        try:
            with self._state:
                self._wanted = True
                if not self.waiting:
                    self.waiting = True
                    self._asked.release()
            if self._answer.acquire(timeout=max(0.0, patience)):
                return True
        except BaseException:
            self._give_up()  # if it came just now, whoever entered the gate leaves it
            raise
        return self._give_up()

    def _give_up(self) -> bool:
        """Want the lock no more; True when it came just now."""
        with self._state:
            self._wanted = False
            return self._answer.acquire(blocking=False)

    def end(self) -> None:
        """Let the thread end; nobody waits."""
        self._wanted = False
        self._ended = True
        self._asked.release()

    def _serve(self) -> None:
        while self._asked.acquire() and not self._ended:
            self._block()
            with self._state:
                if self._wanted:
                    self._answer.release()
                else:
                    lockf(self._descriptor, LOCK_UN)
                self.waiting = False

    def _block(self) -> None:
        while True:
            try:
                lockf(self._descriptor, LOCK_EX)
                return
            except OSError as error:
                # The kernel looks for cycles between processes, not lock owners: two
                # stores in two processes look like a deadlock to it, and are none.
                if error.errno != errno.EDEADLK:
                    return  # without the lock: the gate is fairness only
                time.sleep(0.001)
