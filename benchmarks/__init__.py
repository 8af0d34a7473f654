"""Benchmarks of Agent Checkpoint beside what it is compared with: ``python -m benchmarks [NAME…]``.

One file a benchmark, each with ``measure(plan)`` that yields rows. How to
measure is decided in ``harness``, how to show it in ``report``.
"""
