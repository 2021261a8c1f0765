"""Token formats: one frozen record of facts a format. The codec and the reference read them from here."""

from __future__ import annotations

from dataclasses import dataclass

VECTOR_BYTES = 16
"""Widest access of one thread: payload rows and message fields are multiples of it."""


@dataclass(frozen=True)
class Format:
    """How one token row is stored on the wire and in the output.

    Attributes:
        name: key in manifests, test ids and on the command line.
        bits: bits of one payload element.
        block: elements that share one scale factor (1: the format has none).
        scale: element type of a scale factor ("e4m3"), or None.
        global_scale: whether a float32 scale for the whole tensor multiplies the block scales.
    """

    name: str
    bits: int
    block: int = 1
    scale: str | None = None
    global_scale: bool = False

    def payload_bytes(self, hidden):
        """Bytes of one row's payload; `hidden` may be a Python or a device integer."""
        return hidden * self.bits // 8

    def scale_bytes(self, hidden):
        """Bytes of one row's scale factors, one byte each; 0 when the format has none."""
        return hidden // self.block if self.scale else hidden * 0

    def check_hidden(self, hidden: int) -> None:
        """Raise ValueError unless rows of `hidden` elements are whole blocks and whole 16-byte vectors."""
        if hidden <= 0 or hidden % self.block:
            raise ValueError(f"hidden = {hidden}: must be a positive multiple of the {self.name} block {self.block}")
        if self.payload_bytes(hidden) % VECTOR_BYTES or hidden * self.bits % 8:
            raise ValueError(
                f"hidden = {hidden}: a {self.name} row takes {self.bits * hidden / 8:g} bytes, "
                f"which must be a multiple of {VECTOR_BYTES}"
            )


BF16 = Format("bf16", bits=16)
NVFP4 = Format("nvfp4", bits=4, block=16, scale="e4m3", global_scale=True)

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (BF16, NVFP4)}


def format_named(name: str) -> Format:
    """The registered format called `name`; ValueError lists the known ones."""
    if name not in FORMATS:
        raise ValueError(f"format = {name!r}: must be one of {', '.join(FORMATS)}")
    return FORMATS[name]
