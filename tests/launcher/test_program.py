"""A program sees the same world under `worker.py` as under plain `python`. No MPI needed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mpicomp_launch import worker
from mpicomp_launch.rank import escape

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
    return subprocess.run([sys.executable, *words], capture_output=True, timeout=60, **settings)


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
def test_looks_like_plain_python(tmp_path, script, rank, environ, words, options):
    for name in ("train.py", "pkg/__main__.py", "pkg/mod.py", "pkg/__init__.py"):
        script("" if "init" in name else LOOK, name)
    script(LOOK, "elsewhere/real.py")
    (tmp_path / "linked.py").symlink_to("elsewhere/real.py")
    with zipfile.ZipFile(tmp_path / "pkg.zip", "w") as archive:
        archive.writestr("__main__.py", LOOK)
    expected = plain(*options, *words, cwd=tmp_path, env=environ)
    got = rank(*words, options=options, cwd=tmp_path)
    assert got.returncode == expected.returncode
    assert got.out == expected.stdout


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("words", [("train.py",), ("-m", "train")], ids=["script", "module"])
def test_workers_of_the_program(tmp_path, script, rank, words, method):
    script(POOL)
    done = rank(*words, method, cwd=tmp_path)
    assert done.out == b"[2, 4]\n", done.err


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("", 0, None),
        ("import sys; sys.exit()", 0, None),
        ("import sys; sys.exit(0)", 0, None),
        ("import sys; sys.exit(256)", 0, None),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import sys; sys.exit('sorry')", 1, "sorry\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("1 +", 1, "SyntaxError: invalid syntax\n"),
        (
            "import sys; sys.excepthook = lambda *e: print('mine', file=sys.stderr); 1/0",
            1,
            "mine\n",
        ),
        ("import sys; sys.excepthook = lambda *e: [][1]; 1/0", 1, "by zero\n"),
        ("import sys; sys.stderr.close(); 1 / 0", 1, "by zero\n"),
        ("import sys; sys.stdout = None; 1 / 0", 1, "by zero\n"),
        ("import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (9, 9)); 1 / 0", 1, "by zero\n"),
        ("raise ValueError('x' * 100_000)", 1, "xxx\n"),
    ],
)
def test_exit(script, rank, code, status, text):
    done = rank(script(code))
    assert done.returncode == status
    assert [end["status"] for end in done.ends] == [status]
    assert [failure["status"] for failure in done.failures] == ([] if text is None else [status])
    assert all(failure["text"].endswith(text) for failure in done.failures)


@pytest.mark.parametrize("code", ["1 / 0", "import sys; sys.exit('sorry')"])
def test_failing_child_is_no_failing_rank(script, rank, code):
    done = rank(script(f"import os\nif os.fork() == 0:\n    {code}\nprint(os.wait()[1] >> 8)"))
    assert (done.out, done.returncode, done.failures) == (b"1\n", 0, [])
    assert b"sorry" in done.err or b"ZeroDivisionError" in done.err
    assert b"mpicomp_launch" not in done.err


def test_traceback_shows_the_program_only(script, rank):
    done = rank(script("def f():\n    raise ValueError('no')\nf()\n"))
    text = done.failures[0]["text"]
    assert "mpicomp_launch" not in text
    assert text.startswith("Traceback (most recent call last):\n")
    assert "    raise ValueError('no')" in text


def test_what_was_printed_comes_before_the_report(script, rank):
    done = rank(script("print('loss', end=''); 1 / 0"))
    assert done.out == b"loss"
    assert done.order.lower() == "sofx"


def test_missing_module(rank):
    done = rank("-m", "no_such_module")
    assert done.returncode == 1
    assert "No module named no_such_module" in done.failures[0]["text"]


def test_lone_colons(rank):
    done = rank("-c", "import sys; print(sys.argv[1:])", *map(escape, [":", "::", "a:b", ""]))
    assert done.out == b"[':', '::', 'a:b', '']\n"


def test_directory(tmp_path, rank):
    code = "import os; print(os.getcwd(), sorted(n for n in os.environ if n[:8] == 'MPICOMP_'))"
    done = rank("-c", code, MPICOMP_CHDIR=str(tmp_path), MPICOMP_GRACE="3", MPICOMP_THREADS="auto")
    assert done.out.decode() == f"{tmp_path} ['MPICOMP_REPORT_FD']\n"


def test_missing_directory(tmp_path, rank):
    done = rank("-c", "print(1)", MPICOMP_CHDIR=str(tmp_path / "none"))
    assert (done.out, done.returncode) == (b"", 1)
    assert "working directory must exist" in done.failures[0]["text"]


def test_other_programs(rank):
    script = "echo $0 $1; grep SigIgn /proc/self/status; exit 3"
    done = rank("--exec", "sh", "-c", script, *map(escape, [":", "::"]))
    assert done.out == b": ::\nSigIgn:\t0000000000000000\n"
    assert (done.returncode, done.ends[0]["status"]) == (3, 3)


def test_missing_program(rank):
    done = rank("--exec", "no-such-program")
    assert done.returncode == 127
    assert "got 'no-such-program'" in done.failures[0]["text"]


def test_program_that_replaces_the_rank_may_report(rank):
    code = "import os; os.write(int(os.environ['MPICOMP_REPORT_FD'].split(':')[0]), b'{}\\n')"
    done = rank("--exec", sys.executable, "-c", code)
    assert [failure["status"] for failure in done.failures] == [1]


def test_what_is_installed_beside_the_launcher_is_not_seen(tmp_path, rank):
    package = Path(worker.__file__).parent
    (tmp_path / "mpicomp_launch").symlink_to(package)
    for name in ("json", "signal", "selectors", "typing"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a backport')")
    path = tmp_path / "mpicomp_launch" / "worker.py"
    done = subprocess.run([sys.executable, path, "-c", "0"], capture_output=True, timeout=60)
    assert (done.returncode, b"backport" in done.stderr) == (0, False)


def test_no_module_of_the_launcher_hides_one_of_the_library():
    """The worker's own directory is the first on its path until the program begins."""
    names = {path.stem for path in Path(worker.__file__).parent.iterdir()}
    assert not names & set(sys.stdlib_module_names)
