"""The CUDA source compiles for the devices in use; NVRTC needs neither a device nor a driver."""

from __future__ import annotations

import ctypes
import re
from importlib.metadata import files

import pytest

from mpicomp.compress.select import gpu


@pytest.fixture(scope="module")
def nvrtc():
    shared = [f for f in files("nvidia-cuda-nvrtc") or [] if ".so" in f.name]
    for name in ("builtins", "nvrtc.so"):  # the compiler finds its other half if that is loaded
        (path,) = (f.locate() for f in shared if name in f.name)
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return library


def compile_(nvrtc, source: str, *options: str) -> tuple[int, str, bytes]:
    """Status, log and PTX."""
    program, name = ctypes.c_void_p(), gpu.SOURCE.name.encode()
    reference = ctypes.byref(program)
    assert not nvrtc.nvrtcCreateProgram(reference, source.encode(), name, 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), given)
    log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    ptx = b"" if status else text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    nvrtc.nvrtcDestroyProgram(reference)
    return status, log.decode(errors="replace"), ptx


def text(size_of, read, program) -> bytes:
    size = ctypes.c_size_t()
    assert not size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    assert not read(program, buffer)
    return buffer.value


@pytest.mark.parametrize("capability", [75, 80, 90, 100])
def test_it_compiles_without_a_warning(nvrtc, capability):
    source = gpu.SOURCE.read_text()
    status, log, ptx = compile_(nvrtc, source, f"--gpu-architecture=compute_{capability}")
    assert (status, log.strip("\0\n ")) == (0, "")
    entries = re.findall(rb"\.entry (\w+)", ptx)
    assert sorted(entries) == [b"above_16", b"above_32", b"above_64"]


def test_a_mistake_would_show(nvrtc):
    source = gpu.SOURCE.read_text().replace("const Bits limit", "const Bist limit")
    status, log, _ = compile_(nvrtc, source, "--gpu-architecture=compute_80")
    assert status
    assert "Bist" in log


def test_both_sides_agree_on_the_loads_of_a_thread():
    assert f"constexpr int LOADS = {gpu.LOADS};" in gpu.SOURCE.read_text()
