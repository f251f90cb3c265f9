"""Records byte by byte in numpy: codes by search among all values of a format."""

import math

import numpy as np


def reference_pack(x, format: str, rotary: int, size: int) -> np.ndarray:
    """uint8[n, size] of float[n, c]; rounds to nearest, ties to the even code."""
    x = np.asarray(x, np.float32)
    out = np.zeros((len(x), size), np.uint8)
    for row, record in zip(x, out, strict=True):
        body = row[: len(row) - rotary]
        if format in ("fp8", "fp4"):
            block, bits = (64, 8) if format == "fp8" else (32, 4)
            encode, scale_bytes = _encode_power, 1
        else:
            block, bits = (64, 8) if format == "int8" else (32, 4)
            encode, scale_bytes = _encode_integer, 2
        codes, scales = [], []
        for start in range(0, len(body), block):
            code, scale = encode(body[start : start + block], format)
            codes += code
            scales += scale
        if bits == 4:
            codes = [a | b << 4 for a, b in zip(codes[::2], codes[1::2], strict=True)]
        tail = _bfloat16_bytes(row[len(row) - rotary :])
        data = [*codes, *tail, *scales]
        assert len(scales) == len(body) // block * scale_bytes
        record[: len(data)] = data
    return out


def reference_unpack(records, format: str, channels: int, rotary: int) -> np.ndarray:
    """float32[n, c] of uint8[n, r]."""
    out = np.zeros((len(records), channels), np.float32)
    body = channels - rotary
    block = 64 if format in ("fp8", "int8") else 32
    for row, record in zip(out, records, strict=True):
        code_bytes = body if block == 64 else body // 2
        scales = record[code_bytes + 2 * rotary :]
        for channel in range(body):
            if block == 64:
                code = int(record[channel])
            else:
                code = int(record[channel // 2]) >> (4 * (channel % 2)) & 15
            index = channel // block
            if format in ("fp8", "fp4"):
                byte = int(scales[index])
                scale = math.nan if byte == 255 else 2.0 ** (byte - 127)
                value = (_E4M3 if format == "fp8" else _E2M1)[code]
            else:
                scale = _bfloat16(scales[2 * index], scales[2 * index + 1])
                bits = 8 if format == "int8" else 4
                value = code - (1 << bits) * (code >> (bits - 1))
            row[channel] = value * scale
        for channel in range(rotary):
            at = code_bytes + 2 * channel
            row[body + channel] = _bfloat16(record[at], record[at + 1])
    return out


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    value = (
        mantissa * 2**-9 if not exponent else (8 + mantissa) * 2.0 ** (exponent - 10)
    )
    return math.copysign(value, -1 if code & 128 else 1)


def _e2m1(code: int) -> float:
    value = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]
    return math.copysign(value, -1 if code & 8 else 1)


_E4M3 = [_e4m3(code) for code in range(256)]
_E2M1 = [_e2m1(code) for code in range(16)]


def _encode_power(values, format: str) -> tuple[list[int], list[int]]:
    table = _E4M3[:127] if format == "fp8" else _E2M1[:8]
    sign = 128 if format == "fp8" else 8
    values = [math.copysign(0, v) if abs(v) < 2.0**-126 else float(v) for v in values]
    if not all(math.isfinite(v) for v in values):
        return [0] * len(values), [255]
    largest, exponent = max(abs(v) for v in values), -126
    while largest > table[-1] * 2.0**exponent:
        exponent += 1
    codes = []
    for value in values:
        distance = [abs(abs(value) * 2.0**-exponent - entry) for entry in table]
        near = [c for c in range(len(table)) if distance[c] == min(distance)]
        code = near[0] if len(near) == 1 or near[0] % 2 == 0 else near[1]
        codes.append(code | (sign if math.copysign(1, value) < 0 else 0))
    return codes, [exponent + 127]


def _encode_integer(values, format: str) -> tuple[list[int], list[int]]:
    top, mask = (127, 255) if format == "int8" else (7, 15)
    values = [np.float32(0 if abs(v) < 2.0**-126 else v) for v in values]
    if not all(np.isfinite(v) for v in values):
        return [0] * len(values), [0xC0, 0x7F]
    low, high = _bfloat16_bytes([max(abs(v) for v in values) / np.float32(top)])
    scale = np.float32(_bfloat16(low, high))
    if scale < 2.0**-126:
        return [0] * len(values), [0, 0]
    codes = [int(np.clip(np.rint(v / scale), -top, top)) & mask for v in values]
    return codes, [low, high]


def _bfloat16_bytes(values) -> list[int]:
    out = []
    for value in np.asarray(values, np.float32):
        bits = int(value.view(np.uint32))
        if math.isnan(value):
            bits = bits >> 16 | 0x40
        else:
            bits = bits + 0x7FFF + (bits >> 16 & 1) >> 16
        out += [bits & 255, bits >> 8]
    return out


def _bfloat16(low: int, high: int) -> float:
    return float(np.uint32((int(low) | int(high) << 8) << 16).view(np.float32))
