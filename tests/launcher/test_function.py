"""`mpicomp_launch.run`: from scripts, from a prompt, with everything that can come back."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import mpicomp_launch
from mpicomp_launch import called, function

ROOT = Path(__file__).resolve().parents[2]


def test_script_without_guard(caller):
    done = caller(
        "class Pair:\n"
        "    def __init__(self, one, two): self.one, self.two = one, two\n"
        "    def total(self): return self.one + self.two\n"
        "    def __eq__(self, other): return vars(self) == vars(other)\n"
        "scale = 10\n"
        "def work(pair, *, more):\n"
        "    rank, size = ranks()\n"
        "    return Pair(scale * rank + pair.total(), size + more)\n"
        "found = run(work, (Pair(1, 2),), {'more': 5}, np=2)\n"
        "assert found == [Pair(3, 7), Pair(13, 7)], found\n"
        "assert all(type(each) is Pair for each in found)\n"
        "print([each.total() for each in found])\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[10, 20]\n"
    assert done.stderr == ""


def test_all_kinds_of_callables(caller, tmp_path):
    done = caller(
        "import functools, operator\n"
        "class Counter:\n"
        "    def __init__(self, start): self.start = start\n"
        "    def count(self, by): return self.start + by * ranks()[0]\n"
        "    def __call__(self): return self.start\n"
        "def closure(base): return lambda by: base + by\n"
        "calls = [(lambda: ranks(), ()), (closure(3), (4,)), (Counter(5).count, (2,)),\n"
        "         (Counter(6), ()), (functools.partial(pow, 2), (8,)), (operator.add, [1, 2]),\n"
        "         (os.getcwd, ()), (lambda: sys.argv[1:], ()), (lambda: None, ())]\n"
        "for fn, args in calls:\n"
        "    print(run(fn, args, np=1))\n"
        "print(run(Counter(5).count, (2,), np=2))\n",
    )
    assert done.returncode == 0, done.stderr
    cwd = str([str(tmp_path)])
    expected = ["[(0, 1)]", "[7]", "[5]", "[6]", "[256]", "[3]", cwd, "[[]]", "[None]", "[5, 7]"]
    assert done.stdout.splitlines() == expected


def test_modules_beside_the_script(caller, script):
    script("def double(x): return 2 * x\nclass Odd(Exception): pass\n", "helper.py")
    done = caller(
        "import helper\n"
        "print(run(helper.double, (21,), np=1))\n"
        "def fail(): raise helper.Odd('one')\n"
        "try: run(fail, np=1)\n"
        "except helper.Odd as error: print('odd', error)\n"
    )
    assert done.stdout == "[42]\nodd one\n", done.stderr


def test_code_on_the_command_line(caller, head):
    code = f"{head}\nprint(run(lambda a: (a, *ranks()), ('x',), np=2))"
    done = caller("", "-c", code)
    assert done.stdout == "[('x', 0, 2), ('x', 1, 2)]\n", done.stderr


@pytest.mark.parametrize("words", [("-i",), ("-m", "code", "-q")])
def test_prompt(caller, words):
    lines = [
        "from mpicomp_launch import run",
        "base = 40",
        "def answer(x):",
        "    return base + x",
        "",
        "run(answer, (2,), np=1)",
        "run(lambda: 1 / 0, np=1)",
        "print('still', 'here')",
    ]
    done = caller("", *words, input="\n".join(lines) + "\n")
    assert "[42]" in done.stdout
    assert "still here" in done.stdout
    assert "ZeroDivisionError: division by zero" in done.stderr


NOTEBOOK = """
import code, io, threading
class Stream(io.StringIO):
    def fileno(self): raise io.UnsupportedOperation("fileno")
shown, real = Stream(), sys.stdout
sys.stdout = sys.stderr = shown
before = [signal.getsignal(number) for number in range(1, 32) if number not in (9, 19)]
console = code.InteractiveConsole()
for cell in CELLS:
    console.runsource(cell, symbol="exec")
sys.stdout = real
assert before == [signal.getsignal(number) for number in range(1, 32) if number not in (9, 19)]
assert threading.active_count() == 1
print(shown.getvalue())
"""


def test_notebook(caller):
    """`sys.stdout` is no file there, and cells are not in any."""
    cells = [
        "def hello():\n    print('hello é from a rank')\n    return 5\n",
        "import mpicomp_launch",
        "found = mpicomp_launch.run(hello, np=2, tag='rank')",
        "print(found)",
        "mpicomp_launch.run(lambda: [].pop(), np=1)",
    ]
    done = caller(f"import signal\nCELLS = {cells!r}\n{NOTEBOOK}", head="import sys\n")
    assert done.returncode == 0, done.stderr
    assert "[0] hello é from a rank\n" in done.stdout
    assert "[1] hello é from a rank\n" in done.stdout
    assert "[5, 5]\n" in done.stdout
    assert "IndexError: pop from empty list" in done.stdout
    assert done.stdout.index("hello é") < done.stdout.index("[5, 5]")


def test_output_goes_where_ours_goes(caller):
    done = caller("run(lambda: print('out') or print('err', file=sys.stderr), np=2, tag='none')")
    assert done.stdout == "out\n" * 2
    assert done.stderr == "err\n" * 2


def test_collectives(caller):
    done = caller(
        "def total(n):\n"
        "    from mpi4py import MPI\n"
        "    return MPI.COMM_WORLD.allreduce(n + MPI.COMM_WORLD.rank)\n"
        "print(run(total, (1,), np=2), run(total, (1,), np=1))\n"
    )
    assert done.stdout == "[3, 3] [1]\n", done.stderr


def test_library(caller):
    pytest.importorskip("torch")
    done = caller(
        f"sys.path.append({str(ROOT)!r})\n"
        "def train(lr):\n"
        "    import torch, mpicomp\n"
        "    weight = torch.nn.Parameter(torch.ones(300))\n"
        "    opt = mpicomp.DistributedOptimizer(torch.optim.SGD([weight], lr=lr))\n"
        "    (weight.sum() * (mpicomp.rank() + 1)).backward()\n"
        "    opt.step()\n"
        "    return weight.detach(), os.environ['MPICOMP_COMPRESSION'], os.environ['MINE']\n"
        "for weight, *rest in run(train, (0.5,), np=2, compression='fp16', env={'MINE': 'a b'}):\n"
        "    print(weight[0].item(), weight.shape[0], rest)\n"
    )
    assert done.stdout == "0.25 300 ['fp16', 'a b']\n" * 2, done.stderr


def test_big_results(caller):
    done = caller(
        "found = run(lambda seed: bytes([seed]) * 50_000_000, (7,), np=2)\n"
        "assert found[0] == found[1] == bytes([7]) * 50_000_000\n"
        "assert run(len, (found[0],), np=1) == [50_000_000]\n"
    )
    assert done.returncode == 0, done.stderr


def test_two_at_once(caller):
    done = caller(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(2) as pool:\n"
        "    found = pool.map(lambda n: run(lambda: (n, *ranks()), np=2), 'ab')\n"
        "    print(*found)\n"
    )
    assert done.stdout == "[('a', 0, 2), ('a', 1, 2)] [('b', 0, 2), ('b', 1, 2)]\n", done.stderr


def test_files_are_private(tmp_path):
    called.write(tmp_path / "call", {"a": 1}, [2])
    assert stat.S_IMODE((tmp_path / "call").stat().st_mode) == 0o600
    with pytest.raises(TypeError):
        called.write(tmp_path / "other", {}, threading.Lock())
    assert not (tmp_path / "other").exists()


def test_the_package_stays_light():
    code = (
        "import sys, mpicomp_launch; assert 'mpicomp_launch.function' not in sys.modules;"
        "mpicomp_launch.run; assert not {'cloudpickle', 'rich', 'yaml'} & set(sys.modules)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(function.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        mpicomp_launch.runs  # noqa: B018
