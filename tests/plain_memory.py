"""Memory of a GPU, or that the host shares with it, as ordinary memory."""

from __future__ import annotations

import ctypes
import struct


class PlainHostMemory:
    """`driver.HostMemory` in ordinary memory. `gone` is what others own once it was freed."""

    def __init__(self, words: int) -> None:
        self.words = (ctypes.c_uint32 * words)()
        self.address = ctypes.addressof(self.words)

    def free(self) -> None:
        self.gone, self.words = self.words, type(self.words)(*self.words)


class PlainArena:
    """`driver.DeviceMemory` that is an address, and the words that the host has stored, by offset."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.stored: dict[int, list[int]] = {}

    def store(self, offset: int, words: list[int]) -> None:
        self.stored[offset] = list(words)

    def read(self, nbytes: int, stream: object) -> bytes:
        content = bytearray(nbytes)
        for offset, words in self.stored.items():
            content[offset : offset + 8 * len(words)] = struct.pack(f"{len(words)}Q", *words)
        return bytes(content[:nbytes])
