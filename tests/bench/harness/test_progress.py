"""Progress on stderr: a bar on a terminal, lines elsewhere."""

import sys
import time

import pytest

from fuseopt.bench.harness import progress


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def is_terminal(request, monkeypatch):
    monkeypatch.setattr(progress, "is_terminal", lambda: request.param)
    return request.param


def test_each_item_is_announced(is_terminal, capsys):
    assert list(progress.each(["a", "b"], str.upper)) == ["a", "b"]
    shown = capsys.readouterr().err
    if is_terminal:
        assert "2/2" in shown and "\r" in shown and "B" in shown
    else:
        assert shown == "[1/2] A\n[2/2] B\n"


def test_steps_are_a_bar_or_a_line(is_terminal, capsys):
    assert list(progress.steps(iter("xyz"), "training", 3)) == ["x", "y", "z"]
    shown = capsys.readouterr().err
    assert ("/3 [" in shown and "training" in shown) if is_terminal else shown == "training, 3 steps\n"


def test_waiting_says_so_after_a_while(is_terminal, monkeypatch, capsys):
    with progress.waiting("soon done"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    with pytest.raises(ValueError, match="in between"), progress.waiting("long work"):
        time.sleep(1.2 if is_terminal else 0.1)
        raise ValueError("in between")
    shown = capsys.readouterr().err
    if is_terminal:
        assert "\rlong work ... 1 s" in shown and shown.endswith("\r\033[K")
    else:
        assert shown == "long work ...\n"


def test_without_stderr_nothing_is_said(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert not progress.is_terminal() and list(progress.each([1], str)) == [1]
