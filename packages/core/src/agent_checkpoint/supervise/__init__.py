"""Supervising a command, so that nothing of it outlives the lease it runs under.

The wrapper, which holds the lease, forks the guard, and the guard forks the
command. Wrapper and guard both adopt the orphans below them, and each ends the
whole tree when the other cannot: the guard when the wrapper dies or a deadline
passes, the wrapper when the guard dies or is frozen past a deadline.

What escapes: what another program starts on the command's behalf (a container
engine, ``systemd-run``, ``at``, a terminal multiplexer's running server); a
program that runs as another user, whom we may not signal; what is left without
a parent when wrapper and guard are killed both; everything but the command's
process group where orphans cannot be adopted (not on Linux, or without /proc).
"""

from agent_checkpoint.supervise.wrapper import Ended, Supervisor

__all__ = ["Ended", "Supervisor"]
