"""The folder that compiled libraries are kept in, and the checks before one of them is loaded.

Whoever can write there can run code in every process that loads a library. So a folder or file is refused that a user
other than this one and root owns or can write, or that is reached through such a folder. The SHA-256 of each library
stands beside it, in the format of `sha256sum`: to load a file that was truncated would kill the process.
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
    """There is no cache folder, or it must not be used; the message says why and what helps."""


def folder() -> Path:
    """The cache folder: FUSEOPT_CACHE_DIR, else `fuseopt` in XDG_CACHE_HOME, else in `~/.cache`.

    A relative FUSEOPT_CACHE_DIR is from the folder in which the process first asked. A relative XDG_CACHE_HOME is
    ignored: https://specifications.freedesktop.org/basedir-spec/latest/

    Raises:
        CacheError: none of them names a folder, as this user has no home.
    """
    explicit = os.environ.get("FUSEOPT_CACHE_DIR")
    if explicit:
        named = _expand_user(explicit)
        if named is None:
            raise CacheError(f"FUSEOPT_CACHE_DIR is {explicit!r}, and there is no such home folder")
        return _first_absolute(named)
    for caches in (os.environ.get("XDG_CACHE_HOME", ""), "~/.cache"):
        path = _expand_user(caches)
        if path is not None and os.path.isabs(path):
            return Path(path) / "fuseopt"
    raise CacheError("there is no cache folder, as this user has no home folder; FUSEOPT_CACHE_DIR names one")


def _expand_user(path: str) -> str | None:
    """The path with `~` replaced by the home folder; None where there is none."""
    expanded = os.path.expanduser(path)
    is_unknown = path.startswith("~") and (expanded.startswith("~") or os.environ.get("HOME") == "")
    return None if is_unknown else expanded


@functools.cache
def _first_absolute(path: str) -> Path:
    return Path(path).absolute()


def check_trusted(path: Path) -> None:
    """Look at a file or folder, which need not exist, and at every folder and link that leads to it.

    A folder on the way may be writable for everybody if it is sticky, as /tmp: nobody else can replace what is ours
    in it.

    Raises:
        CacheError: another user owns or can write one of them.
        OSError: one of them cannot be looked at.
    """
    if os.name != "posix":
        return
    for step, status, is_last in _steps(path):
        reason = _distrust(step, status, is_last=is_last)
        if reason is not None:
            what = "" if step == path else f", which leads to {path},"
            raise CacheError(f"{step}{what} {reason}. Or let FUSEOPT_CACHE_DIR name a folder of your own")


def _distrust(path: Path, status: os.stat_result, *, is_last: bool) -> str | None:
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        help = f"sudo chown -h {user} {shlex.quote(str(path))}"
        return f"belongs to user {status.st_uid}, this process runs as {user}: code from there is not loaded ({help})"
    if stat.S_ISLNK(status.st_mode):
        return None
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writable == stat.S_IWGRP and _is_private_group(path, status):
        return None
    if not writable or (status.st_mode & stat.S_ISVTX and stat.S_ISDIR(status.st_mode) and not is_last):
        return None
    mode, help = stat.S_IMODE(status.st_mode), f"chmod go-w {shlex.quote(str(path))}"
    return f"can be written by other users (mode {mode:04o}): code from there is not loaded ({help})"


def _is_private_group(path: Path, status: os.stat_result) -> bool:
    """Whether the file's group is that of its owner alone, as where each user has a group of the same name."""
    import grp
    import pwd

    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    alone = owner.pw_gid == status.st_gid and owner.pw_name == group.gr_name and {*group.gr_mem} <= {owner.pw_name}
    # Many users of containers have group 0. Under an access control list the group's bits are those of others as well.
    return alone and status.st_gid != 0 and not _has_access_list(path)


def _has_access_list(path: Path) -> bool:
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except (OSError, AttributeError):  # a file system or an operating system without them
        return False


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Every folder and link on the way to `path`, which is absolute, from the root on, and whether it is the last.

    Ends early where `path` does not exist.
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
    """Make the cache folder and what is missing above it, for this user alone, whatever the umask.

    Raises:
        CacheError: another user could write it, as `check_trusted` says.
        OSError: it cannot be made.
    """
    for missing in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        with contextlib.suppress(FileExistsError):  # another process was faster
            missing.mkdir()
            missing.chmod(0o700)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a folder")
    check_trusted(path)


def publish(built: Path, library: Path) -> None:
    """Move a library that has just been built to its place, whole and with its digest."""
    digest = built.with_name(f"{built.name}.sha256")
    digest.write_text(f"{_sha256(built)}  {library.name}\n", encoding="ascii")
    for file, place in ((built, library), (digest, _digest_file(library))):
        file.chmod(0o600)
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
        os.replace(file, place)


def damage(library: Path) -> str | None:
    """Why the file, which exists, is not what was built; None if its digest is the one beside it.

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
    """Of a file that is the same as long as its identity is."""
    return _sha256(library)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
