from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from mpicomp.settings import Settings, read


def test_defaults():
    assert read({}) == Settings()
    assert read({"PATH": "/bin", "mpicomp_stats": "1", "OMPI_MPICOMP": "x"}) == Settings()


def test_all_fields_can_be_set():
    given = {
        "MPICOMP_COMPRESSION": "topk:density=0.5",
        "MPICOMP_FUSION_MB": "0.5",
        "MPICOMP_SHARED_MEMORY": "0",
        "MPICOMP_SHARED_MEMORY_DIR": "/tmp/with space",
        "MPICOMP_STALL_SECONDS": "1e3",
        "MPICOMP_STALL_SHUTDOWN_SECONDS": "inf",
        "MPICOMP_TRACE": "trace.json",
        "MPICOMP_PROMETHEUS": "0.0.0.0:9000",
        "MPICOMP_STATS": "yes",
        "MPICOMP_EXPECT_SIZE": "4",
        "MPICOMP_REPORT_FD": "7:1234",
    }
    values = dataclasses.astuple(read(given))
    infinity = float("inf")
    assert values == (
        *("topk:density=0.5", 0.5, False, "/tmp/with space", 1000.0, infinity, "trace.json"),
        *("0.0.0.0:9000", True, 4, "7:1234"),
    )
    assert len(given) == len(dataclasses.fields(Settings))


def test_options_of_the_launcher_are_not_ours():
    assert read({"MPICOMP_LAUNCH_TAG": "none", "MPICOMP_LAUNCH_": "x"}) == Settings()


@pytest.mark.parametrize("text", ["1", "true", "True", "YES", "on"])
def test_true(text):
    assert read({"MPICOMP_STATS": text}).stats is True


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF"])
def test_false(text):
    assert read({"MPICOMP_SHARED_MEMORY": text}).shared_memory is False


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("MPICOMP_COMPRESION", "MPICOMP_COMPRESSION"),
        ("MPICOMP_FUSION", "MPICOMP_FUSION_MB"),
        ("MPICOMP_SHM_DIR", "MPICOMP_SHARED_MEMORY_DIR"),
        ("MPICOMP_STALL_TIMEOUT", "MPICOMP_STALL_SECONDS"),
        ("MPICOMP_STAT", "MPICOMP_STATS"),
    ],
)
def test_a_typing_mistake_is_an_error_with_the_nearest_name(name, near):
    with pytest.raises(ValueError) as caught:
        read({name: "1"})
    assert str(caught.value) == (
        f"environment: {name} is not a setting of mpicomp; did you mean {near}?"
    )


def test_a_name_like_none_of_ours():
    with pytest.raises(ValueError, match="MPICOMP_ is not a setting of mpicomp"):
        read({"MPICOMP_": "1"})


@pytest.mark.parametrize(
    ("name", "text", "contract"),
    [
        ("MPICOMP_STATS", "2", "0 or 1"),
        ("MPICOMP_SHARED_MEMORY", "nope", "0 or 1"),
        ("MPICOMP_FUSION_MB", "25 MB", "a number >= 0"),
        ("MPICOMP_FUSION_MB", "-1", "a number >= 0"),
        ("MPICOMP_STALL_SECONDS", "nan", "a number >= 0"),
        ("MPICOMP_EXPECT_SIZE", "2.0", "a whole number >= 0"),
        ("MPICOMP_EXPECT_SIZE", "-2", "a whole number >= 0"),
    ],
)
def test_values_that_do_not_fit(name, text, contract):
    with pytest.raises(ValueError) as caught:
        read({name: text})
    assert str(caught.value) == f"environment: {name} must be {contract}, got {text!r}"


def test_init_reads_them(environ):
    pytest.importorskip("mpi4py")
    words = [sys.executable, "-c", "import mpicomp; mpicomp.init()"]
    environ = environ | {"MPICOMP_STALL_SECOND": "1"}
    run = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "did you mean MPICOMP_STALL_SECONDS?" in run.stderr


def test_an_empty_variable_is_not_set():
    assert read({"MPICOMP_SHARED_MEMORY": "", "MPICOMP_STALL_SECONDS": ""}) == read({})
