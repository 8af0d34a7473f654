"""Where a database may live: only where SQLite's locks and shared memory can be trusted."""

from __future__ import annotations

import os
import stat

from agent_checkpoint.errors import UnsupportedFilesystemError
from agent_checkpoint.mounts import LOCAL, filesystem_of, mounts

# Shared or host-passed filesystems: POSIX locks or mmap are not coherent between
# all who can open the file.
REFUSED = frozenset(
    "nfs nfs4 cifs smb smb2 smb3 smbfs 9p virtiofs ceph glusterfs lustre gpfs ocfs2 gfs2 afs vboxsf prl_fs".split()  # noqa: SIM905 -- reads better than a column of strings
)
# What these are called behind "fuse."; other fuse filesystems (encfs, bindfs, …) are local.
REFUSED_FUSE = frozenset(
    """sshfs glusterfs ceph ceph-fuse s3fs rclone gcsfuse goofys juicefs moosefs mfs davfs curlftpfs vmhgfs-fuse
    blobfuse blobfuse2 lustre nfs gvfsd-fuse objectivefs""".split()  # noqa: SIM905 -- as above
)


def check(path: str) -> str:
    """The filesystem type under ``path``; "" when unknown.

    Raises:
        UnsupportedFilesystemError: a network or shared filesystem, or a file with a second name.
    """
    table = mounts()
    _refuse_second_name(path, table)
    kind = filesystem_of(os.path.dirname(path) or os.curdir, table)
    if kind in REFUSED or kind.removeprefix("fuse.") in REFUSED_FUSE:
        raise UnsupportedFilesystemError(
            f"{path} is on {kind}: its locks cannot be trusted between machines", database=path, filesystem=kind
        )
    return kind


def _refuse_second_name(path: str, table: list[tuple[str, str]]) -> None:
    """SQLite keeps the write-ahead log beside the name: under two names one file has two logs."""
    try:
        file = os.stat(path)
    except OSError:
        return
    names = file.st_nlink if stat.S_ISREG(file.st_mode) else 1
    why = "has several names (hard links)" if names > 1 else "is a mount point by itself"
    if names > 1 or any(point == path for point, _ in table):
        raise UnsupportedFilesystemError(
            f"{path} {why}: each name would have its own write-ahead log, and tokens be granted twice",
            hint="remove the other name; into a container mount the folder, not the file",
            database=path,
            filesystem=None,
        )


def is_one_kernel(kind: str) -> bool:
    """Whether only one running kernel at a time can have files of this filesystem open."""
    return kind in LOCAL
