"""Benchmarks of Agent Checkpoint beside what it is compared with: ``python -m benchmarks [NAME…]``.

One file a benchmark, each with ``measure(plan)`` that yields rows, curves and
notes. How to measure is decided in ``harness``; what was found is a
``document``, and everything shown is made from it: lines by ``report``, tables
by ``results``, plots by ``pictures``.
"""
