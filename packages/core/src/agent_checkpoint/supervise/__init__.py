"""Supervising a command, so that nothing of it outlives the lease it runs under.

The wrapper, which holds the lease, forks the guard, and the guard forks the
command. Wrapper and guard both adopt the orphans below them, and each ends the
whole tree when the other cannot: the guard when the wrapper dies or a deadline
passes, the wrapper when the guard dies or is frozen past a deadline.

What escapes:

- what another program starts on the command's behalf: a container engine,
  ``systemd-run``, ``at``, the running server of a terminal multiplexer;
- a program that runs as another user, whom we may not signal: it is waited for;
- when wrapper and guard are killed both, what the command had started (the
  command itself dies with the guard), and while one is dead and the other
  frozen, or both are frozen, everything until one wakes;
- all but the command's process group where orphans cannot be adopted: not on
  Linux, or without a ``/proc`` of the own pid namespace.
"""

from agent_checkpoint.supervise.wrapper import Ended, Supervisor

__all__ = ["Ended", "Supervisor"]
