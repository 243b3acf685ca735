"""A program sees the same world under `worker.py` as under plain `python`. No MPI needed."""

import subprocess
import sys
import zipfile

import pytest

from mpicomp_launch import worker

LOOK = """
import __main__, os, pickle, sys
class Mine: pass
def look():
    spec = __main__.__spec__
    return [sys.argv, sys.path, __name__, __package__, getattr(__main__, "__file__", None),
            type(__builtins__).__name__, spec and (spec.name, spec.origin),
            pickle.loads(pickle.dumps(Mine())).__class__ is Mine, sys.flags.optimize]
print(look())
import atexit
vars(__main__).pop("__file__", None)  # python 3.11 does so by itself
atexit.register(lambda: print(look()))
"""
POOL = """
import multiprocessing, os, sys
class Mine:
    def __init__(self, value): self.value = value
def double(mine): return Mine(2 * mine.value)
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2) as pool:
        print([mine.value for mine in pool.map(double, [Mine(1), Mine(2)])])
"""


def plain(*words, **settings):
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=60, **settings
    )


def through_worker(*words, options=(), **settings):
    return plain(*options, worker.__file__, *words, **settings)


@pytest.mark.parametrize("options", [(), ("-I",), ("-O",), ("-s", "-u")])
@pytest.mark.parametrize(
    "words",
    [
        ("train.py", "-m", "a b", ""),
        ("./linked.py",),
        ("pkg",),
        ("pkg.zip", "x"),
        ("-m", "pkg", "-c"),
        ("-m", "pkg.mod"),
        ("-c", LOOK, "-u"),
    ],
    ids=lambda words: words[0] + words[1][:8] if len(words) > 1 else words[0],
)
def test_looks_like_plain_python(tmp_path, script, words, options):
    for name in ("train.py", "pkg/__main__.py", "pkg/mod.py", "pkg/__init__.py"):
        script("" if "init" in name else LOOK, name)
    script(LOOK, "elsewhere/real.py")
    (tmp_path / "linked.py").symlink_to("elsewhere/real.py")
    with zipfile.ZipFile(tmp_path / "pkg.zip", "w") as archive:
        archive.writestr("__main__.py", LOOK)
    expected = plain(*options, *words, cwd=tmp_path)
    got = through_worker(*words, options=options, cwd=tmp_path)
    assert got.returncode == expected.returncode
    assert got.stdout == expected.stdout


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("words", [("train.py",), ("-m", "train")], ids=["script", "module"])
def test_workers_of_the_program(tmp_path, script, words, method):
    script(POOL)
    done = through_worker(*words, method, cwd=tmp_path)
    assert done.stdout == "[2, 4]\n", done.stderr


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("", 0, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(0)", 0, ""),
        ("import sys; sys.exit(256)", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import sys; sys.exit('sorry')", 1, "] sorry\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("1 +", 1, "SyntaxError: invalid syntax\n"),
        ("import os; os.fork() or 1 / 0; os.wait()", 0, "ZeroDivisionError: division by zero\n"),
        ("import sys; sys.excepthook = lambda *e: print('mine', file=sys.stderr); 1/0", 1, "mine"),
        ("import sys; sys.stderr.close(); 1 / 0", 1, ""),
    ],
)
def test_exit(tmp_path, script, code, status, text):
    path, note = script(code), tmp_path / "status"
    done = through_worker(path, env={"MPICOMP_STATUS_FILE": str(note)})
    assert done.returncode == status
    assert text in done.stderr
    assert (note.read_text() if note.exists() else "0") == str(status)


def test_traceback_shows_the_program_only(script):
    done = through_worker(script("def f():\n    raise ValueError('no')\nf()\n"))
    assert done.stderr.startswith("[rank ? on ")
    assert "worker.py" not in done.stderr
    assert "    raise ValueError('no')" in done.stderr


def test_first_status_stays(tmp_path):
    note = tmp_path / "status"
    worker.note_status(str(note), 3)
    worker.note_status(str(note), 4)
    assert note.read_text() == "3"


def test_missing_module():
    done = through_worker("-m", "no_such_module")
    assert done.returncode == 1
    assert "No module named no_such_module" in done.stderr
