"""Copies through page-locked memory, on a stand-in for a device that copies late: when somebody waits."""

from __future__ import annotations

import ctypes
import gc
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flash_rnnt_cupy.backends.cuda.driver import _Staging
from flash_rnnt_cupy.backends.cuda.memory import DeviceArray, contiguous_strides


class Pinned(bytearray):
    """Page-locked memory."""

    @property
    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


class Event:
    """The end of what was queued before it."""

    def __init__(self, stream: LateStream) -> None:
        self.stream, self.number = stream, len(stream.copies)

    @property
    def done(self) -> bool:
        return self.stream.n_done >= self.number

    def synchronize(self) -> None:
        for target, source, nbytes in self.stream.copies[self.stream.n_done : self.number]:
            ctypes.memmove(target, source, nbytes)
        self.stream.n_done = max(self.stream.n_done, self.number)


class LateStream:
    """The one stream of a device, as CuPy shows it."""

    ptr = 0

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int]] = []
        self.n_done = 0
        self.memories: list[weakref.ref[Pinned]] = []

    def record(self) -> Event:
        return Event(self)

    def copy(self, target: int, source: int, nbytes: int, _kind: int, _stream: int) -> None:
        self.copies.append((target, source, nbytes))

    def allocate(self, nbytes: int) -> Pinned:
        memory = Pinned(nbytes)
        self.memories.append(weakref.ref(memory))
        return memory

    def held(self) -> list[bool]:
        """Of each allocated memory, whether somebody holds it."""
        gc.collect()
        return [memory() is not None for memory in self.memories]


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    late = LateStream()
    runtime = types.SimpleNamespace(memcpyAsync=late.copy, memcpyHostToDevice=1, memcpyDeviceToHost=2)
    cuda = types.SimpleNamespace(runtime=runtime, alloc_pinned_memory=late.allocate, get_current_stream=lambda: late)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    return late


def on_device(array: np.ndarray[Any, Any]) -> DeviceArray:
    return DeviceArray(array.ctypes.data, array.shape, array.dtype.name, contiguous_strides(array.shape), array)


def finish(stream: LateStream) -> None:
    stream.record().synchronize()


def test_upload_begins_each_array_on_a_whole_word(stream: LateStream) -> None:
    device = np.full(6, -1, np.int64)
    arrays = [
        np.array([1, 2, 3], np.int32),
        np.zeros(0, np.int64),
        np.array([4]),
        np.array([5], np.int32),
        np.array([6]),
    ]
    staging = _Staging()
    staging.upload(arrays, on_device(device))
    assert (device == -1).all()
    finish(stream)
    assert device[:2].view(np.int32).tolist() == [1, 2, 3, 0]
    assert device[2:].tolist() == [4, 5, 6, -1]


def test_download_waits_for_its_own_copy(stream: LateStream) -> None:
    staging, device = _Staging(), np.arange(6.0).reshape(2, 3)
    wait = staging.download(on_device(device))
    staging.upload([np.arange(3)], on_device(np.zeros(3, np.int64)))
    array = wait()
    np.testing.assert_array_equal(array, device)
    assert stream.n_done == 1
    device[:] = 0
    assert array[1, 2] == 5  # a copy


@pytest.mark.parametrize("begin", ["upload", "download"])
def test_memory_is_held_until_the_copy_has_ended(stream: LateStream, begin: str) -> None:
    staging, device = _Staging(), np.zeros(3, np.int64)
    started: dict[str, Callable[[], Any]] = {
        "upload": lambda: staging.upload([np.arange(3)], on_device(device)),
        "download": lambda: staging.download(on_device(device)),
    }
    started[begin]()  # an error ends the call that began it: nobody is left to wait
    assert stream.held() == [True]
    finish(stream)
    staging.upload([np.arange(3)], on_device(device))
    assert stream.held() == [False, True]
