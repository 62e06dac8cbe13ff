"""The cache folder for compiled libraries, and the checks before a library is loaded.

Whoever can write to the folder can run code in every process that loads a library. So a folder or file is refused if
a user other than this one or root owns it or can write it, or if its path leads through such a folder. Each library has
a SHA-256 file beside it, in the format of `sha256sum`, because loading a truncated library kills the process.
"""

import contextlib
import functools
import hashlib
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

_MOST_LINKS = 40  # on one path, as in Linux


class CacheError(Exception):
    """There is no cache folder, or it must not be used; the message gives the reason and the fix."""


def folder() -> Path:
    """The cache folder: FUSEOPT_CACHE_DIR, else `fuseopt` in XDG_CACHE_HOME, else in `~/.cache`.

    A relative FUSEOPT_CACHE_DIR is relative to the current folder of the first call in this process. A relative
    XDG_CACHE_HOME is ignored: https://specifications.freedesktop.org/basedir-spec/latest/

    Raises:
        CacheError: none of them names a folder, because this user has no home folder.
    """
    explicit = os.environ.get("FUSEOPT_CACHE_DIR")
    if explicit:
        named = _expand_user(explicit)
        if named is None:
            raise CacheError(
                f"FUSEOPT_CACHE_DIR is {explicit!r}, but there is no such home folder; set it to a full path"
            )
        return _first_absolute(named)
    for caches in (os.environ.get("XDG_CACHE_HOME", ""), "~/.cache"):
        path = _expand_user(caches)
        if path is not None and os.path.isabs(path):
            return Path(path) / "fuseopt"
    raise CacheError("there is no cache folder: this user has no home folder; set FUSEOPT_CACHE_DIR to a folder")


def _expand_user(path: str) -> str | None:
    """The path with `~` replaced by the home folder; None if there is no such home folder."""
    expanded = os.path.expanduser(path)
    is_unknown = path.startswith("~") and (expanded.startswith("~") or os.environ.get("HOME") == "")
    return None if is_unknown else expanded


@functools.cache
def _first_absolute(path: str) -> Path:
    return Path(path).absolute()


def check_trusted(path: Path) -> None:
    """Check owner and mode of a file or folder, which need not exist, and of every folder and link on its path.

    A parent folder may be world-writable if it is sticky, as /tmp is: other users cannot replace our files in it.

    Raises:
        CacheError: another user owns or can write one of them; the message has the command that fixes it.
        OSError: one of them cannot be read.
    """
    if os.name != "posix":
        return
    for step, status, is_last in _steps(path):
        reason = _distrust(step, status, is_last=is_last)
        if reason is not None:
            what = "" if step == path else f", which leads to {path},"
            raise CacheError(f"{step}{what} {reason}. Or set FUSEOPT_CACHE_DIR to a folder of your own")


def _distrust(path: Path, status: os.stat_result, *, is_last: bool) -> str | None:
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        fix = f"sudo chown -h {user} {shlex.quote(str(path))}"
        return (
            f"belongs to user {status.st_uid}, this process runs as {user}: code from there is not loaded (fix: {fix})"
        )
    if stat.S_ISLNK(status.st_mode):
        return None
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writable == stat.S_IWGRP and _is_private_group(path, status):
        return None
    if not writable or (status.st_mode & stat.S_ISVTX and stat.S_ISDIR(status.st_mode) and not is_last):
        return None
    mode, fix = stat.S_IMODE(status.st_mode), f"chmod go-w {shlex.quote(str(path))}"
    return f"can be written by other users (mode {mode:04o}): code from there is not loaded (fix: {fix})"


def _is_private_group(path: Path, status: os.stat_result) -> bool:
    """Whether the owner is the only member of the file's group, as on systems where each user has a group."""
    import grp
    import pwd

    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    alone = owner.pw_gid == status.st_gid and owner.pw_name == group.gr_name and {*group.gr_mem} <= {owner.pw_name}
    # In containers many users share group 0. With an access control list the group bits apply to other users too.
    return alone and status.st_gid != 0 and not _has_access_list(path)


def _has_access_list(path: Path) -> bool:
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except (OSError, AttributeError):  # a file system or an operating system without them
        return False


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Every folder and link on the absolute `path`, from the root on: its path, its status, whether it is the last.

    Ends early if `path` does not exist.
    """
    here, links = Path(path.anchor), 0
    names = list(reversed(path.parts[1:]))
    yield here, here.lstat(), not names
    while names:
        name = names.pop()
        if name == os.pardir:
            here = here.parent
            continue
        step = here / name
        try:
            status = step.lstat()
        except FileNotFoundError:
            return
        yield step, status, not names
        if not stat.S_ISLNK(status.st_mode):
            here = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(f"{path} is reached through more than {_MOST_LINKS} links")
        target = Path(os.readlink(step))
        if target.is_absolute():
            here = Path(target.anchor)
        names += reversed(target.parts[target.is_absolute() :])


def create(path: Path) -> None:
    """Create the cache folder and missing parents with mode 0700, whatever the umask.

    Raises:
        CacheError: see `check_trusted`.
        OSError: it cannot be created.
    """
    for missing in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        with contextlib.suppress(FileExistsError):  # another process was faster
            missing.mkdir()
            missing.chmod(0o700)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a folder")
    check_trusted(path)


def publish(built: Path, library: Path) -> None:
    """Move a new library and its digest to their places, each atomically."""
    digest = built.with_name(f"{built.name}.sha256")
    digest.write_text(f"{_sha256(built)}  {library.name}\n", encoding="ascii")
    for file, place in ((built, library), (digest, _digest_file(library))):
        file.chmod(0o600)
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
        os.replace(file, place)


def damage(library: Path) -> str | None:
    """Why an existing library is not the one that was built; None if it matches the digest beside it.

    Raises:
        CacheError: another user owns or can write one of the two.
        OSError: the library cannot be read.
    """
    check_trusted(library)
    check_trusted(_digest_file(library))
    try:
        expected = _digest_file(library).read_text(encoding="ascii").split()[0]
    except (OSError, ValueError, IndexError):
        return f"there is no digest of it in {_digest_file(library).name}"
    status = library.stat()
    if _digest_of(library, status.st_ino, status.st_size, status.st_mtime_ns) != expected:
        return f"its digest is not that in {_digest_file(library).name}: it is truncated, or was changed or replaced"
    return None


def _digest_file(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


@functools.lru_cache(maxsize=8)
def _digest_of(library: Path, *identity: int) -> str:
    """SHA-256 of a file, cached as long as its inode, size and time of change (`identity`) stay the same."""
    return _sha256(library)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
