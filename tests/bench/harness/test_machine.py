"""What a result file says of where it was made."""

import re

from fuseopt.bench.harness import machine
from fuseopt.build import loader


def test_the_commit_of_a_checkout_of_its_copy_and_of_neither(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_CHECKOUT", tmp_path)
    monkeypatch.delenv("FUSEOPT_COMMIT", raising=False)
    assert machine.commit() is None
    monkeypatch.setenv("FUSEOPT_COMMIT", "0123456789ab")
    assert machine.commit() == "0123456789ab"
    monkeypatch.undo()
    monkeypatch.delenv("FUSEOPT_COMMIT", raising=False)
    if (machine._CHECKOUT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", machine.commit())
        monkeypatch.setenv("FUSEOPT_COMMIT", "0123456789ab")
        assert machine.commit() == "0123456789ab"


def test_machine_and_versions_are_words():
    for entries in (machine.machine(), machine.versions()):
        assert entries and all(isinstance(value, str) and value for value in entries.values())


def test_the_native_libraries_that_there_are_are_named(monkeypatch):
    states = {"cpu": "loaded", "cuda": "available", "python": "buildable"}
    monkeypatch.setattr(loader, "state", lambda kind: loader.LibraryState(kind, states[kind]))
    assert machine.machine()["native libraries"] == "cpu, cuda"
    monkeypatch.setattr(loader, "state", lambda kind: loader.LibraryState(kind, "absent"))
    assert machine.machine()["native libraries"] == "none"
