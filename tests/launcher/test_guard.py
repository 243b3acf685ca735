"""A rank's output and reports arrive whole, in order, and whatever they consist of."""

import hashlib
import subprocess
import sys
import time

import pytest

from mpicomp_launch import worker
from mpicomp_launch.frames import LISTENED_TO

# Output.


def test_one_long_line(rank):
    done = rank("-c", "import sys; sys.stdout.write('y' * 20_000_000)")
    assert hashlib.md5(done.out).digest() == hashlib.md5(b"y" * 20_000_000).digest()
    assert done.plain == []


def test_binary_junk(rank):
    code = "import os, sys; [os.write(n, bytes(range(256)) * 300) for n in (1, 2)]"
    done = rank("-c", code)
    assert done.out == done.err == bytes(range(256)) * 300
    assert done.plain == []


def test_streams_keep_their_order(rank):
    code = "import sys\nfor n in range(5000): print(n); print(-n, file=sys.stderr)"
    done = rank("-c", code)
    assert done.out.split() == [b"%d" % n for n in range(5000)]
    assert done.err.split() == [b"%d" % -n for n in range(5000)]


def test_closed_streams(rank):
    done = rank("-c", "import os, sys; os.close(1); print('e', file=sys.stderr); os.close(2)")
    assert (done.err, done.returncode) == (b"e\n", 0)


def test_a_report_and_the_end_of_all_output_at_once(rank):
    code = "\n".join(
        [
            "import os, signal",
            "os.kill(os.getppid(), signal.SIGSTOP)  # the guard, until there is all to read",
            "os.write(int(os.environ['MPICOMP_REPORT_FD'].split(':')[0]), b'{}\\n')",
            "os.close(1), os.close(2)",
            "os.kill(os.getppid(), signal.SIGCONT)",
        ]
    )
    done = rank("-c", code)
    assert (len(done.failures), len(done.ends), done.plain) == (1, 1, [])


def test_a_child_that_still_writes(rank):
    done = rank("-c", "import os, time; os.fork() or [time.sleep(0.3), print('late')]")
    assert done.out == b"late\n"


def test_progress_is_shown_before_its_line_ends(rank):
    loop = "for n in range(50): sys.stdout.write(f'{n}\\r'); sys.stdout.flush(); time.sleep(0.02)"
    done = rank("-c", f"import sys, time\n{loop}")
    assert done.order.count("O") > 3
    assert done.out == b"".join(b"%d\r" % n for n in range(50))


def test_a_slow_reader_loses_nothing(environ):
    code = "for n in range(12000): print('line', n)"
    with subprocess.Popen(
        [sys.executable, worker.__file__, "-c", code],
        env={**environ, LISTENED_TO: "1"},
        stderr=subprocess.PIPE,
    ) as process:
        time.sleep(6)
        lines = process.stderr.read().splitlines()
    assert len(lines) == 12002


# Reports.

REPORT = """
import os, time
def write(data): os.write(int(os.environ["MPICOMP_REPORT_FD"].split(":")[0]), data)
"""


@pytest.mark.parametrize(
    ("written", "status", "text"),
    [
        (b'{"status": 3, "text": "why"}\n', 3, "why"),
        (b'{"status": 0, "text": "why"}\n', 1, "why"),
        (b'{"status": 3}\n', 3, ""),
        (b'{"status": "3", "text": "why"}\n', 1, '{"status": "3", "text": "why"}\n'),
        (b"[]\n", 1, "[]\n"),
        (b"what a mess \xff\n", 1, "what a mess \ufffd\n"),
        (b"[" * 5000 + b"\n", 1, "[" * 5000 + "\n"),
        (b'{"status": 3, "text": "first"}\n{"status": 4, "text": "second"}\n', 3, "first"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_reports_of_others(rank, written, status, text):
    done = rank("-c", REPORT + f"write({written!r}); time.sleep(0.3); write(b'more\\n' * 20000)")
    assert done.failures == [{"status": status, "text": text}]
    assert done.ends == [{"status": 0, "signal": 0, "stopped": False}]


def test_half_a_report_is_none(rank):
    done = rank("-c", REPORT + "write(b'{')")
    assert (done.failures, done.returncode) == ([], 0)
