"""A layer between SQLite and its files: it hears of every call that changes one, and may let it fail.

It is a copy of SQLite's own default VFS whose ``xOpen`` gives each file a copy
of its methods with ours in between. Made with ctypes in the very library that
Python's ``sqlite3`` uses, which is proven before anything is believed. What
goes into the shared memory of a WAL's index are no calls, so nobody hears of it.
"""

from __future__ import annotations

import _sqlite3
import ctypes
import os
import sqlite3
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

OK, IOERR, FULL, CANTOPEN = 0, 10, 13, 14
# What SQLite's own VFS answers when the system says EIO, by the call (sqlite3.h, extended result codes).
ILL = {
    "write": IOERR | 3 << 8,
    "sync": IOERR | 4 << 8,
    "truncate": IOERR | 6 << 8,
    "delete": IOERR | 10 << 8,
    "shm": IOERR | 21 << 8,
    "open": CANTOPEN,
}
# The same when it says ENOSPC: a sync has but one error, and the shared memory one for its size.
NO_SPACE = {"write": FULL, "sync": ILL["sync"], "shm": IOERR | 19 << 8, "open": CANTOPEN}
CREATE, WAL, JOURNALS = 0x4, 0x80000, 0x800 | 0x4000 | 0x80000


class Fault(NamedTuple):
    """How a call fails: SQLite's code, and how many bytes of a write reached the file before."""

    code: int
    written: int = 0


class Call(NamedTuple):
    """A call that changes a file. ``place`` is an offset or a size, ``flags`` those of ``open``, ``delete``."""

    kind: str
    file: int
    path: str
    place: int = 0
    size: int = 0
    buffer: int = 0
    flags: int = 0

    def data(self) -> bytes:
        """What is written; during the call only."""
        return ctypes.string_at(self.buffer, self.size)


Handler = Callable[[Call], "Fault | None"]
Method = Callable[..., int]

_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


def _pointers(names: str) -> list[tuple[str, Any]]:
    return [(name, _P) for name in names.split()]


class _Methods(ctypes.Structure):
    """sqlite3_io_methods, version 3."""

    _fields_ = [
        ("iVersion", _I),
        *_pointers("xClose xRead xWrite xTruncate xSync xFileSize xLock xUnlock xCheckReservedLock xFileControl"),
        *_pointers("xSectorSize xDeviceCharacteristics xShmMap xShmLock xShmBarrier xShmUnmap xFetch xUnfetch"),
    ]


class _Vfs(ctypes.Structure):
    """sqlite3_vfs, version 3."""

    _fields_ = [
        ("iVersion", _I),
        ("szOsFile", _I),
        ("mxPathname", _I),
        *_pointers("pNext zName pAppData xOpen xDelete xAccess xFullPathname xDlOpen xDlError xDlSym xDlClose"),
        *_pointers("xRandomness xSleep xCurrentTime xGetLastError xCurrentTimeInt64"),
        *_pointers("xSetSystemCall xGetSystemCall xNextSystemCall"),
    ]


_OPEN = ctypes.CFUNCTYPE(_I, _P, _P, _P, _I, _P)
_DELETE = ctypes.CFUNCTYPE(_I, _P, _P, _I)
_CLOSE = ctypes.CFUNCTYPE(_I, _P)
_WRITE = ctypes.CFUNCTYPE(_I, _P, _P, _I, _L)
_TRUNCATE = ctypes.CFUNCTYPE(_I, _P, _L)
_SYNC = ctypes.CFUNCTYPE(_I, _P, _I)
_SHM_MAP = ctypes.CFUNCTYPE(_I, _P, _I, _I, _I, _P)


class Layer:
    """The layer itself: there once in a process, since SQLite may keep its address."""

    def __init__(self) -> None:
        self.handler: Handler | None = None
        self.counts: Counter[str] = Counter()
        self._library = ctypes.CDLL(getattr(_sqlite3, "__file__", None))  # finds what Python's module is linked with
        self._library.sqlite3_vfs_find.restype = _P
        self._library.sqlite3_vfs_find.argtypes = [ctypes.c_char_p]
        self._library.sqlite3_vfs_register.argtypes = [_P, _I]
        self._library.sqlite3_vfs_unregister.argtypes = [_P]
        self._library.sqlite3_sourceid.restype = ctypes.c_char_p
        self._found = self._library.sqlite3_vfs_find(None)
        self._right = _Vfs.from_address(self._found)
        assert self._right.iVersion >= 3, "SQLite's own VFS is of another version"
        self._name = ctypes.create_string_buffer(b"agent-checkpoint-faults")
        self._paths: dict[int, str] = {}
        self._methods: dict[int, _Methods] = {}
        self._kept: list[Any] = []
        self._vfs = _Vfs.from_buffer_copy(self._right)
        self._vfs.zName = ctypes.addressof(self._name)
        self._open = _OPEN(self._right.xOpen)
        self._delete = _DELETE(self._right.xDelete)
        self._vfs.xOpen = self._pointer(_OPEN, self._on_open)
        self._vfs.xDelete = self._pointer(_DELETE, self._on_delete)

    @contextmanager
    def between(self, handler: Handler) -> Iterator[Layer]:
        """Let every file that is opened meanwhile pass its calls by the handler."""
        self.handler = handler
        self._library.sqlite3_vfs_register(ctypes.addressof(self._vfs), 1)
        try:
            yield self
        finally:
            self._library.sqlite3_vfs_register(self._found, 1)
            self._library.sqlite3_vfs_unregister(ctypes.addressof(self._vfs))
            self.handler = None

    def prove(self, folder: str) -> None:
        """Fail unless Python's SQLite really goes through here."""
        path = os.path.join(folder, "proof.db")
        before = self.counts.copy()
        with self.between(lambda call: None):
            connection = sqlite3.connect(path)
            (source,) = connection.execute("SELECT sqlite_source_id()").fetchone()
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE t (x)")
            connection.close()
        assert self._library.sqlite3_sourceid().decode() == source, "another SQLite than Python's"
        heard = {kind for kind, count in self.counts.items() if count > before[kind]}
        assert heard >= {"open", "write", "sync", "delete", "shm"}, f"heard only of {heard}"
        os.unlink(path)

    def _pointer(self, prototype: Any, function: Callable[..., int]) -> int | None:
        def guarded(*arguments: Any) -> int:
            try:
                return function(*arguments)
            except BaseException:  # it cannot pass through C: told, and then an error like any other
                traceback.print_exc()
                return IOERR

        kept = prototype(guarded)
        self._kept.append(kept)
        return ctypes.cast(kept, _P).value

    def _ask(self, call: Call) -> Fault | None:
        self.counts[call.kind] += 1
        return None if self.handler is None else self.handler(call)

    def _on_open(self, vfs: int, name: int | None, file: int, flags: int, out_flags: int | None) -> int:
        path = ctypes.string_at(name).decode(errors="surrogateescape") if name else ""
        fault = self._ask(Call("open", file, path, flags=flags))
        if fault is not None:
            ctypes.c_void_p.from_address(file).value = None  # not to be closed
            return fault.code
        code = self._open(self._found, name, file, flags, out_flags)
        methods = ctypes.c_void_p.from_address(file)
        if code == OK and methods.value:
            self._paths[file] = path
            methods.value = ctypes.addressof(self._ours(methods.value))
        return code

    def _on_delete(self, vfs: int, name: int, sync_folder: int) -> int:
        path = ctypes.string_at(name).decode(errors="surrogateescape")
        fault = self._ask(Call("delete", 0, path, flags=sync_folder))
        return self._delete(self._found, name, sync_folder) if fault is None else fault.code

    def _ours(self, address: int) -> _Methods:
        """A copy of a file's methods with ours in between."""
        if address not in self._methods:
            right = _Methods.from_address(address)
            ours = self._methods[address] = _Methods.from_buffer_copy(right)
            ours.xClose = self._pointer(_CLOSE, self._closing(_CLOSE(right.xClose)))
            ours.xWrite = self._pointer(_WRITE, self._writing(_WRITE(right.xWrite)))
            ours.xTruncate = self._pointer(_TRUNCATE, self._truncating(_TRUNCATE(right.xTruncate)))
            ours.xSync = self._pointer(_SYNC, self._syncing(_SYNC(right.xSync)))
            if right.iVersion >= 2 and right.xShmMap:
                ours.xShmMap = self._pointer(_SHM_MAP, self._mapping(_SHM_MAP(right.xShmMap)))
        return self._methods[address]

    def _closing(self, right: Method) -> Method:
        def close(file: int) -> int:
            self._paths.pop(file, None)
            return right(file)

        return close

    def _writing(self, right: Method) -> Method:
        def write(file: int, buffer: int, size: int, offset: int) -> int:
            fault = self._ask(Call("write", file, self._paths[file], offset, size, buffer))
            if fault is None:
                return right(file, buffer, size, offset)
            if fault.written:
                right(file, buffer, min(size, fault.written), offset)
            return fault.code

        return write

    def _truncating(self, right: Method) -> Method:
        def truncate(file: int, size: int) -> int:
            fault = self._ask(Call("truncate", file, self._paths[file], size))
            return right(file, size) if fault is None else fault.code

        return truncate

    def _syncing(self, right: Method) -> Method:
        def sync(file: int, flags: int) -> int:
            fault = self._ask(Call("sync", file, self._paths[file]))
            return right(file, flags) if fault is None else fault.code

        return sync

    def _mapping(self, right: Method) -> Method:
        def shm_map(file: int, region: int, size: int, extend: int, out: int) -> int:
            fault = self._ask(Call("shm", file, self._paths[file], region, size))
            if fault is None:
                return right(file, region, size, extend, out)
            ctypes.c_void_p.from_address(out).value = None
            return fault.code

        return shm_map


LAYER = Layer()
