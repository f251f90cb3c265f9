"""The record formats: which bytes stand where.

A record is one row of channels: codes of the quantised channels, the rotary channels in
bfloat16, the blocks' scales, zeros. All little-endian. 4-bit codes lie two a byte, the
even channel in the low half.
"""

from dataclasses import dataclass

from pallas_kernels.abi import Layout, aligned

ROW = "r"


@dataclass(frozen=True)
class Format:
    """A number format with one scale per block of channels.

    Attributes:
      name: as in `FORMATS`.
      bits: of a code.
      block: channels that share a scale.
      scale_bytes: 1 for a power of two (ue8m0: 2^(byte - 127), 255 = NaN), 2 for
        bfloat16.
      largest: magnitude of the largest code.
      unit: bytes; records are zero-padded to a multiple.
    """

    name: str
    bits: int
    block: int
    scale_bytes: int
    largest: float
    unit: int

    def code_bytes(self, channels: int, rotary: int) -> int:
        """Bytes of the codes of one record; checks that they fill whole blocks."""
        quantised = channels - rotary
        if rotary < 0 or quantised <= 0 or quantised % self.block:
            raise ValueError(
                f"{self.name}: {channels} channels less {rotary} rotary ones: expected "
                f"a positive multiple of {self.block}"
            )
        return quantised * self.bits // 8

    def scale_at(self, channels: int, rotary: int) -> int:
        """Byte at which the scales begin, after codes and rotary channels."""
        return self.code_bytes(channels, rotary) + 2 * rotary

    def record_bytes(self, channels: int, rotary: int) -> int:
        """Bytes of one record without alignment."""
        end = self.scale_at(channels, rotary)
        end += (channels - rotary) // self.block * self.scale_bytes
        return -(-end // self.unit) * self.unit


FORMATS = {
    # 448 e4m3 codes, 64 rotary channels, 7 scales and 1 byte of padding: the 584-byte
    # record of DeepSeek-V4 caches.
    "fp8": Format("fp8", bits=8, block=64, scale_bytes=1, largest=448.0, unit=8),
    # 128 e2m1 codes and 4 scales: its 68-byte index key (OCP MX, MXFP4).
    "fp4": Format("fp4", bits=4, block=32, scale_bytes=1, largest=6.0, unit=4),
    "int8": Format("int8", bits=8, block=64, scale_bytes=2, largest=127.0, unit=4),
    "int4": Format("int4", bits=4, block=32, scale_bytes=2, largest=7.0, unit=4),
}


def format_named(name: str) -> Format:
    """The format, or a ValueError that lists the names."""
    if name not in FORMATS:
        raise ValueError(f"format {name!r}: expected one of {', '.join(FORMATS)}")
    return FORMATS[name]


def record_layout(
    format: str,
    channels: int,
    *,
    rotary: int = 0,
    leading: tuple[str, ...] = ("b", "e"),
    alignment: int = 1,
    ratio: int = 1,
) -> Layout:
    """Layout of uint8 records [*leading, r].

    Args:
      format: a name of `FORMATS`.
      channels: of a row, rotary ones included.
      rotary: trailing channels that stay in bfloat16.
      leading: names of the axes before the record's bytes.
      alignment: bytes; a record is zero-padded to a multiple.
      ratio: tokens per record.
    """
    size = format_named(format).record_bytes(channels, rotary)
    layout = Layout(
        axes=(*leading, ROW),
        sizes=(*(None,) * len(leading), size),
        dtype="uint8",
        quantization=f"{format}/{channels}/{rotary}",
        ratio=ratio,
    )
    return aligned(layout, alignment)
