"""Every SQL statement on core's tables, a file a table; no decision is made here."""
