"""Which filesystem a path is on."""

from __future__ import annotations

import pytest

from agent_checkpoint import UnsupportedFilesystemError
from agent_checkpoint.mounts import filesystem_of
from agent_checkpoint.sqlite import filesystem

TABLE = [("/", "ext4"), ("/srv", "xfs"), ("/srv/data", "nfs4"), ("/srv/data/fast", "tmpfs"), ("/srv", "btrfs")]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", "ext4"),
        ("/srv/x", "btrfs"),
        ("/srvx", "ext4"),
        ("/srv/data/x", "nfs4"),
        ("/srv/data/fast/x/y", "tmpfs"),
        ("/srv/data", "nfs4"),
    ],
)
def test_the_longest_mount_prefix_decides_and_the_latest_of_equals(path: str, kind: str) -> None:
    assert filesystem_of(path, TABLE) == kind


def test_without_a_mount_table_the_answer_is_unknown() -> None:
    assert filesystem_of("/x", []) == ""


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "9p", "virtiofs", "fuse.sshfs", "fuse.rclone", "lustre", "ceph"]
)
def test_a_filesystem_between_machines_is_refused_before_anything_is_written(
    kind: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "filesystem_of", lambda *_: kind)  # no such mount can be made here
    with pytest.raises(UnsupportedFilesystemError) as refused:
        filesystem.check(f"{tmp_path}/agents.db")
    assert refused.value.facts["filesystem"] == kind


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "fuse.encfs", "zfs", ""])
def test_a_local_or_unknown_filesystem_is_taken(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "filesystem_of", lambda *_: kind)
    assert filesystem.check("agents.db") == kind
    assert filesystem.is_one_kernel(kind) is (kind in ("ext4", "tmpfs", "zfs"))
