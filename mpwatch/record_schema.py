"""The shape of `record.sqlite`, and which journal mode its file system allows.

Shared by the side that writes and the side that reads. `steps` is for people and pandas: one
narrow row per step of every rank and optimizer. SQLite keeps no NaN: a NaN loss is NULL with bit 1
of `nan_flags` set (bit 2: gradient norm); infinities are kept. The frames in `chunks` keep all.
"""

import os
from pathlib import Path
from typing import Final

FORMAT: Final = 1
APPLICATION_ID: Final = 0x6D707731  # "mpw1"

NAN_LOSS: Final = 1
NAN_GRAD_NORM: Final = 2

# Spans of the roll-ups, in steps; each is a multiple of the one before.
SPANS: Final = (50, 1000, 30_000)

STEP_COLUMNS: Final = (
    "cursor",
    "attempt",
    "rank",
    "optimizer",
    "step",
    "superseded",
    "applied",
    "overflow",
    "micro_batches",
    "loss",
    "loss_scale",
    "grad_norm",
    "learning_rate",
    "duration_s",
    "samples",
    "tokens",
    "time",
    "nan_flags",
)

SCHEMA: Final = f"""
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps (
    cursor INTEGER PRIMARY KEY, attempt INTEGER, rank INTEGER, optimizer INTEGER, step INTEGER,
    superseded INTEGER, applied INTEGER, overflow INTEGER, micro_batches INTEGER, loss REAL,
    loss_scale REAL, grad_norm REAL, learning_rate REAL, duration_s REAL, samples INTEGER,
    tokens INTEGER, time REAL, nan_flags INTEGER);
CREATE INDEX IF NOT EXISTS leading_steps ON steps (step)
    WHERE rank = 0 AND optimizer = 0 AND superseded = 0;
CREATE TABLE IF NOT EXISTS rollups (
    span INTEGER, first_step INTEGER, last_step INTEGER, count INTEGER, skipped INTEGER,
    loss_min REAL, loss_mean REAL, loss_max REAL, loss_count INTEGER, loss_scale_min REAL,
    loss_scale_last REAL, grad_norm_max REAL, duration_s REAL, time REAL, nan_flags INTEGER,
    PRIMARY KEY (span, first_step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks (
    first_cursor INTEGER PRIMARY KEY, last_cursor INTEGER, frames BLOB);
CREATE TABLE IF NOT EXISTS fold (id INTEGER PRIMARY KEY, cursor INTEGER, state BLOB);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT}
"""

# WAL needs memory shared between processes, which these do not give between machines.
_NETWORK_FILE_SYSTEMS: Final = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.sshfs",
        "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs",
        "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
    }
)  # fmt: skip


def file_system_of(path: Path, mountinfo: str) -> str:
    """The type of the file system that holds `path`, from the text of /proc/self/mountinfo.

    "" where that text does not say. The longest mount point wins, of equal ones the last mounted.
    """
    real = os.path.realpath(path)
    found, longest = "", -1
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not separator or len(fields) < 5 or not kind:
            continue
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = point == "/" or real == point or real.startswith(point + "/")
        if inside and len(point) >= longest:
            found, longest = kind[0], len(point)
    return found


def wal_is_safe(path: Path) -> bool:
    """Whether WAL may be tried for a database at `path`: not on a network file system."""
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text("utf-8", "replace")
    except OSError:
        return True
    return file_system_of(path, mountinfo) not in _NETWORK_FILE_SYSTEMS
