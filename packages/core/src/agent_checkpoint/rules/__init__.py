"""Every decision, pure: from rows to what shall be written, and the answer.

A rule reads no clock and touches no database; it knows neither SQL nor plugins.
"""
