"""The port on SQLite: one file, no service.

Only SQLite opens and closes the database, its ``-wal`` and its ``-shm``: a
POSIX ``close`` of any of them would drop the locks of the whole process.
"""
