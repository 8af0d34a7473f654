"""What a saver must keep: LangGraph's published conformance suite, and clauses of our own in its style.

It needs ``langgraph-checkpoint-conformance``, which the saver itself does not.
A clause is an async function that takes a saver and asserts; a list names the
clauses of a capability, and a ``run_…`` function runs them.
"""
