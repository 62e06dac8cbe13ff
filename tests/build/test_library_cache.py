"""A cached library is loaded only if it is what was built and no other user can write it."""

import ctypes
import grp
import hashlib
import os
import pwd
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from fuseopt.bench.harness import machine
from fuseopt.build import compilation, library_cache, loader, toolchain
from tests.build.processes import compilations, output_of, start_process

OTHER_USER = 4242
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def digest_file(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


@pytest.fixture
def built(csrc, monkeypatch) -> Path:
    """A library that this process has not loaded, in a cache folder three levels below the test's own."""
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", str(csrc.parent / "outer" / "inner" / "cache"))
    path = loader.state("cpu").path
    library_cache.create(path.parent)
    compilation.build(toolchain.cpu_recipe(), path, publish=library_cache.publish)
    return path


def load_again(monkeypatch: pytest.MonkeyPatch) -> loader.LibraryState:
    monkeypatch.setattr(loader, "_settled", {})
    return loader.load("cpu")


def give_away(path: Path) -> None:
    os.chown(path, OTHER_USER, -1)


def open_for_all(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


def open_for_a_group(path: Path) -> None:
    os.chown(path, -1, OTHER_USER)
    path.chmod(path.stat().st_mode | 0o020)


def make_sticky(path: Path) -> None:
    path.chmod(0o1777)


PLACES = {
    "library": lambda library: library,
    "digest": digest_file,
    "cache folder": lambda library: library.parent,
    "parent": lambda library: library.parent.parent,
    "parent's parent": lambda library: library.parent.parent.parent,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=list(PLACES))
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(give_away, f"belongs to user {OTHER_USER}, this process runs as ", marks=needs_root),
        pytest.param(open_for_a_group, "can be written by other users (mode 0", marks=needs_root),
        (open_for_all, "can be written by other users (mode 0"),
    ],
)
def test_what_another_user_can_change_is_not_loaded_until_its_fix_is_run(built, monkeypatch, place, spoil, words):
    spoil(place(built))
    assert loader.state("cpu").status == "absent"
    refused = load_again(monkeypatch)
    assert (refused.status, refused.origin, refused.path) == ("absent", None, None)
    assert refused.reason.startswith(str(place(built))) and words in refused.reason
    assert "FUSEOPT_CACHE_DIR" in refused.reason
    fix = refused.reason.rpartition(" (fix: ")[2].partition(")")[0].removeprefix("sudo ")
    subprocess.run(fix, shell=True, check=True)
    assert load_again(monkeypatch).origin == "cache"


def test_a_sticky_folder_may_hold_the_cache_folder_but_not_be_it(built, monkeypatch):
    make_sticky(built.parent.parent)
    assert load_again(monkeypatch).origin == "cache"
    make_sticky(built.parent)
    assert "can be written by other users (mode 1777)" in load_again(monkeypatch).reason


def test_nothing_is_created_in_a_folder_that_others_can_write(csrc, monkeypatch):
    open_for_all(csrc.parent)
    state = loader.load("cpu")
    assert state.status == "absent" and "can be written by other users" in state.reason
    assert not library_cache.folder().exists()


@needs_root
def test_a_link_of_another_user_leads_nowhere(built, monkeypatch):
    link = built.parent.parent / "link"
    link.symlink_to(built.parent)
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", str(link))
    assert load_again(monkeypatch).origin == "cache"
    os.lchown(link, OTHER_USER, -1)
    assert load_again(monkeypatch).reason.startswith(f"{link} belongs to user {OTHER_USER}")


def test_every_folder_on_the_way_through_links_counts(built, monkeypatch, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "second").symlink_to(built.parent)
    (tmp_path / "first").symlink_to(Path("open") / ".." / "open" / "second")
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", str(tmp_path / "first"))
    assert load_again(monkeypatch).origin == "cache"
    open_for_all(tmp_path / "open")
    assert load_again(monkeypatch).reason.startswith(f"{tmp_path / 'open'}, which leads to {tmp_path / 'first'}")


def test_links_in_a_circle_are_a_reason(csrc, monkeypatch, tmp_path):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", str(tmp_path / "circle" / "cache"))
    assert "links" in loader.load("cpu").reason


@needs_root
def test_a_group_of_the_user_alone_may_write(built, monkeypatch):
    """As on systems where each user has a group of the same name, and new folders are open to it."""
    open_for_a_group(built.parent)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_name="me", pw_gid=OTHER_USER))
    for name, members, is_taken in (("me", [], True), ("me", ["me"], True), ("me", ["you"], False), ("us", [], False)):
        group = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr(grp, "getgrgid", lambda number, group=group: group)
        assert (load_again(monkeypatch).status == "loaded") == is_taken
    monkeypatch.setattr(grp, "getgrgid", lambda number: SimpleNamespace(gr_name="me", gr_mem=[]))
    monkeypatch.setattr(os, "listxattr", lambda path: ["system.posix_acl_access"])
    assert load_again(monkeypatch).status == "absent"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o377])
def test_what_is_created_is_for_this_user_alone_whatever_the_umask(csrc, monkeypatch, umask):
    top = csrc.parent / "new"
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", str(top / "cache"))
    before = os.umask(umask)
    try:
        assert loader.load("cpu").status == "loaded"
    finally:
        os.umask(before)
    modes = {path.name.partition(".")[2]: path.stat().st_mode & 0o7777 for path in (top / "cache").iterdir()}
    assert modes == {"so": 0o600, "so.sha256": 0o600, "so.lock": 0o600}
    assert [folder.stat().st_mode & 0o7777 for folder in (top, top / "cache")] == [0o700, 0o700]


def cut_off(library: Path) -> None:
    """The headers of a truncated library name pages beyond its end, so loading it kills the process."""
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(content[:4096])


def put_text_there(library: Path) -> None:
    library.unlink()
    library.write_text("not a library")


def put_a_library_without_ops_there(library: Path) -> None:
    library.unlink()
    subprocess.run(["c++", "-shared", "-x", "c++", os.devnull, "-o", str(library)], check=True)


def make_of_another_machine(library: Path) -> None:
    """A library with a matching digest that does not load here, as in a cache shared by machines."""
    content = bytearray(library.read_bytes())
    content[18:20] = struct.pack("<H", 0xF3)  # e_machine: RISC-V
    library.unlink()
    library.write_bytes(content)
    digest_file(library).write_text(f"{hashlib.sha256(content).hexdigest()}  {library.name}\n")


DAMAGES = {
    cut_off: "its digest is not that in cpu-",
    put_a_library_without_ops_there: "its digest is not that in cpu-",
    make_of_another_machine: "cannot be loaded",
    put_text_there: "its digest is not that in cpu-",
    lambda library: digest_file(library).unlink(): "there is no digest of it in cpu-",
    lambda library: digest_file(library).write_text(""): "there is no digest of it in cpu-",
}


@pytest.mark.parametrize(("spoil", "words"), DAMAGES.items())
def test_what_is_not_what_was_built_is_built_again(built, logging_compiler, monkeypatch, capfd, spoil, words):
    loader._recipe.cache_clear()  # which has the compiler before it
    before = built.read_bytes()
    spoil(built)
    rebuilt = load_again(monkeypatch)
    assert (rebuilt.status, rebuilt.origin, rebuilt.path) == ("loaded", "built", built)
    assert words in rebuilt.damage
    assert f"(the one in the cache is replaced: {rebuilt.damage})" in capfd.readouterr().err
    assert compilations(logging_compiler) == 2
    assert ctypes.CDLL(str(built)).answer() == 42
    assert built.read_bytes() == before
    assert load_again(monkeypatch).origin == "cache"


@pytest.mark.slow
def test_a_truncated_library_kills_no_process_and_is_built_once(built, csrc, logging_compiler):
    cut_off(built)
    statement = "print(loader.state('cpu').status, loader.load('cpu').status)"
    processes = [start_process(csrc, statement) for _ in range(2)]
    assert {output_of(process) for process in processes} <= {"buildable loaded", "available loaded"}
    assert compilations(logging_compiler) == 2


def test_damage_that_must_not_be_mended_is_a_reason(built, monkeypatch):
    cut_off(built)
    monkeypatch.setenv("FUSEOPT_NO_BUILD", "1")
    state = load_again(monkeypatch)
    assert state.status == "absent" and "FUSEOPT_NO_BUILD" in state.reason
    assert str(built) in state.reason and "it is truncated" in state.reason
    assert "it is truncated" in machine.environment()["native code"]["cpu"]


def test_a_compiler_whose_libraries_cannot_be_loaded_is_asked_once(csrc, monkeypatch, tmp_path, logging_compiler):
    """A library that cannot be loaded right after it was built is not built again."""
    (csrc / "cpu" / "other.cpp").write_text("int nowhere(); int (*other)() = nowhere;\n")
    state = loader.load("cpu")
    assert state.status == "absent" and "nowhere" in state.reason
    assert loader.load("cpu") is state and compilations(logging_compiler) == 2


def test_a_library_is_on_disk_before_it_has_its_name(csrc, monkeypatch):
    done = []
    replace, fsync = os.replace, os.fsync

    def written(descriptor: int) -> None:
        done.append(("written", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def named(source: Path, target: Path) -> None:
        done.append(("named", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", written)
    monkeypatch.setattr(os, "replace", named)
    library = loader.load("cpu").path.name
    names = (library, f"{library}.sha256")
    assert done == [(what, name) for name in names for what in ("written", "named")]


@pytest.fixture
def no_folder_named(monkeypatch, tmp_path):
    for name in ("FUSEOPT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_a_relative_xdg_folder_is_ignored(no_folder_named, monkeypatch, tmp_path):
    assert library_cache.folder() == tmp_path / "home" / ".cache" / "fuseopt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert library_cache.folder() == tmp_path / "xdg" / "fuseopt"
    for relative in ("xdg", "./xdg", "../xdg"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert library_cache.folder() == tmp_path / "home" / ".cache" / "fuseopt"


def test_the_home_folder_may_be_written_as_a_tilde(no_folder_named, monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", "~/here")
    assert library_cache.folder() == tmp_path / "home" / "here"
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", "~nobody-of-this-name/here")
    with pytest.raises(library_cache.CacheError, match="there is no such home folder"):
        library_cache.folder()


def test_a_relative_cache_folder_stays_where_it_first_was(no_folder_named, monkeypatch, tmp_path):
    library_cache._first_absolute.cache_clear()
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", "relative")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    assert library_cache.folder() == tmp_path / "relative"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert library_cache.folder() == tmp_path / "relative"


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_without_a_home_nothing_is_loaded_from_the_working_folder(csrc, no_folder_named, monkeypatch, tmp_path, home):
    def no_such_user(user: int) -> None:
        raise KeyError(user)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", no_such_user)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    state = loader.load("cpu")
    assert state.status == "absent" and "this user has no home folder; set FUSEOPT_CACHE_DIR" in state.reason
    assert "no home folder" in machine.environment()["native code"]["cache"]
    assert [path.name for path in tmp_path.iterdir()] == ["csrc"]


def without_the_right_to_write_anywhere() -> None:
    """Root, in a process that is about to start, is bound by the modes of files as others are."""
    drop_from_bounding_set, override_modes = 24, 1
    if os.geteuid() == 0:
        assert ctypes.CDLL(None, use_errno=True).prctl(drop_from_bounding_set, override_modes, 0, 0, 0) == 0


def test_a_read_only_cache_folder_serves_what_it_has_and_takes_no_more(built, csrc):
    built.parent.chmod(0o555)
    statement = """
print(loader.load('cpu').origin)
loader._settled.clear()
loader._recipe.cache_clear()
(toolchain.CSRC / 'dtypes.h').write_text('constexpr int kAnswer = 43;')
print(loader.load('cpu').reason)
"""
    try:
        process = start_process(csrc, statement, preexec_fn=without_the_right_to_write_anywhere)
        origin, reason = output_of(process).splitlines()
    finally:
        built.parent.chmod(0o755)
    assert origin == "cache"
    assert "cannot be written" in reason and "Permission denied" in reason and "FUSEOPT_CACHE_DIR" in reason
    assert len(list(built.parent.glob("*.so"))) == 1
