"""What is printed for many ranks, and what goes to files."""

import io

import pytest

from mpicomp_launch.output import Printer


class Terminal(io.BytesIO):
    def isatty(self):
        return True


@pytest.fixture
def printer():
    """A printer, and what it has written to both streams."""

    def make(stream=io.BytesIO, **settings):
        out, err = stream(), stream()
        made = Printer(out, err, **{"num_ranks": 12, **settings})
        return made, lambda: (out.getvalue().decode(), err.getvalue().decode())

    return make


def test_tags(printer):
    made, written = printer(tag="rank")
    made.line(3, "a", "o", b"out")
    made.line(11, "a", "e", b"err")
    assert written() == ("[ 3] out\n", "[11] err\n")
    made, written = printer(tag="host:rank")
    made.line(3, "a", "o", b"out")
    assert written()[0] == "[a: 3] out\n"


def test_pieces_of_a_line_are_put_together(printer):
    made, written = printer(tag="rank")
    made.piece(1, "a", "o", b"be")
    made.line(2, "a", "o", b"other")
    made.line(1, "a", "o", b"gin")
    made.piece(1, "a", "o", b"no end")
    made.close()
    assert written()[0] == "[ 2] other\n[ 1] begin\n[ 1] no end\n"


def test_without_tags_all_bytes_pass_at_once(printer):
    made, written = printer()
    made.piece(1, "a", "o", b"50 %\r")
    assert written()[0] == "50 %\r"
    made.line(1, "a", "o", b"100 %")
    made.close()
    assert written()[0] == "50 %\r100 %\n"


def test_of_a_progress_bar_the_last_state_stays(printer):
    made, written = printer(tag="rank")
    made.piece(1, "a", "o", b"\r50 %")
    made.line(1, "a", "o", b"\r100 %\r")
    assert written()[0] == "[ 1] 100 %\n"


def test_on_a_terminal_it_is_shown_meanwhile(printer, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    made, written = printer(Terminal, tag="rank")
    made.piece(1, "a", "o", b"\r50 %")
    made.line(2, "a", "o", b"x")
    assert written() == ("[ 2] x\n", "\r\x1b[K[ 1] 50 %\r\x1b[K")


def test_colours_on_a_terminal_only(printer, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    made, written = printer(Terminal, tag="rank")
    made.line(1, "a", "o", b"x")
    assert written()[0] == "\x1b[33m[ 1]\x1b[0m x\n"


def test_files_have_both_streams_without_tags(printer, tmp_path):
    made, _ = printer(tag="rank", timestamps=True, directory=str(tmp_path / "a/b"))
    made.line(3, "a", "o", b"out")
    made.piece(3, "a", "e", b"pi")
    made.line(3, "a", "e", b"ece")
    made.close()
    file = tmp_path / "a/b/rank-03.log"
    assert file.read_bytes() == b"out\npiece\n"
    assert file.stat().st_mode & 0o777 == 0o600
