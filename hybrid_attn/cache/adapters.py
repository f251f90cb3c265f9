"""`MemoryAdapter`: what a memory is like, asked of the machine or described."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from hybrid_attn.cache.planning import (
    DeviceMemory,
    DoesNotFit,
    Footprint,
    Kind,
    Plan,
    plan,
)
from hybrid_attn.cache.spec import CacheSpec

__all__ = [
    "CpuAdapter",
    "DescribedAdapter",
    "DeviceAdapter",
    "DeviceMemory",
    "DoesNotFit",
    "Footprint",
    "MemoryAdapter",
    "NoSuchMemory",
    "NullAdapter",
    "Plan",
    "memory_adapter",
    "plan",
]

_COPY_BYTES = 32 << 20
# Granules that jax does not tell: pages of CUDA's and ROCm's virtual memory and the
# line of their last cache; of a TPU a tile and the widest alignment.
_PAGE = {"cuda": 2 << 20, "rocm": 2 << 20, "tpu": 4096}
_LINE = {"cuda": 128, "rocm": 128, "tpu": 256}


class NoSuchMemory(RuntimeError):
    """The memory is not there, or does not say what a plan needs to know."""


class MemoryAdapter(Protocol):
    """One kind of memory; an adapter that derives from this has `plan`."""

    @property
    def kind(self) -> Kind: ...

    def probe(self) -> DeviceMemory:
        """The memory as it is now.

        Raises:
          NoSuchMemory: it is missing, or a number is; names which.
        """
        ...

    def plan(self, spec: CacheSpec, parameters: int, **options: Any) -> Plan:
        """`planning.plan` for the memory as it is now, with the same options."""
        return plan(self.probe(), spec, parameters, **options)


class DescribedAdapter(MemoryAdapter):
    """A memory known from its numbers alone."""

    def __init__(self, memory: DeviceMemory):
        self.memory = memory

    @property
    def kind(self) -> Kind:
        return self.memory.kind

    def probe(self) -> DeviceMemory:
        return self.memory


class NullAdapter(DescribedAdapter):
    """No memory: nothing is kept."""

    def __init__(self) -> None:
        super().__init__(DeviceMemory("null", "null", 0, 0, 0, 0, 0.0, 0))


class CpuAdapter(MemoryAdapter):
    """Host memory, within the control group's limit; ``root`` is the file system's."""

    def __init__(self, root: Path = Path("/")):
        self._root = root

    @property
    def kind(self) -> Kind:
        return "cpu"

    def probe(self) -> DeviceMemory:
        total, free = self._memory()
        return DeviceMemory(
            kind="cpu",
            name="host memory",
            total_bytes=total,
            free_bytes=min(free, total),
            page_bytes=os.sysconf("SC_PAGE_SIZE"),
            line_bytes=_cache_line(),
            copy_bandwidth=_copy_bandwidth(np.copyto),
            pinned_limit=min(_lock_limit(), free),
        )

    def _memory(self) -> tuple[int, int]:
        """(total, available) bytes: of the machine, and of the group if it has less."""
        path = self._root / "proc/meminfo"
        if not path.exists():
            raise NoSuchMemory(f"cpu: {path} is missing, so free_bytes is not known")
        lines = (line.split() for line in path.read_text().splitlines())
        fields = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words}
        for name in ("MemTotal", "MemAvailable"):
            if name not in fields:
                raise NoSuchMemory(f"cpu: {path} has no {name}")
        total, free = fields["MemTotal"], fields["MemAvailable"]
        group = self._root / "sys/fs/cgroup"
        for most, used in (
            ("memory.max", "memory.current"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ):
            limit, current = (_number(group / name) for name in (most, used))
            if limit is not None and current is not None:
                total = min(total, limit)
                free = min(free, max(limit - current, 0))
        return total, free


class DeviceAdapter(MemoryAdapter):
    """The first device of an accelerator backend, through jax."""

    def __init__(
        self,
        kind: Kind,
        devices: Callable[[str], Sequence[Any]] = jax.devices,
        bandwidth: Callable[[Any], float] | None = None,
    ):
        """Takes the kind; ``devices`` and ``bandwidth`` stand in for a machine's own.

        Raises:
          ValueError: a kind that is no accelerator.
        """
        if kind not in _PAGE:
            raise ValueError(f"kind={kind!r}: expected one of {', '.join(_PAGE)}")
        self._kind: Kind = kind
        self._devices = devices
        self._bandwidth = bandwidth or _device_bandwidth

    @property
    def kind(self) -> Kind:
        return self._kind

    def probe(self) -> DeviceMemory:
        try:
            device = self._devices(self.kind)[0]
        except (RuntimeError, IndexError) as error:
            raise NoSuchMemory(f"{self.kind}: jax has no such device") from error
        stats = device.memory_stats() or {}
        for name in ("bytes_limit", "bytes_in_use"):
            if name not in stats:
                raise NoSuchMemory(
                    f"{self.kind}: memory_stats() of {device.device_kind} has no {name}"
                )
        total = int(stats["bytes_limit"])
        host = CpuAdapter()._memory()[1]
        return DeviceMemory(
            kind=self.kind,
            name=device.device_kind,
            total_bytes=total,
            free_bytes=max(total - int(stats["bytes_in_use"]), 0),
            page_bytes=_PAGE[self.kind],
            line_bytes=_LINE[self.kind],
            copy_bandwidth=self._bandwidth(device),
            # The backend locks its staging itself, whatever a process may lock.
            pinned_limit=host // 2,
        )


def memory_adapter(kind: str) -> MemoryAdapter:
    """The adapter of a kind: cpu, cuda, rocm, tpu or null.

    Raises:
      ValueError: another kind.
    """
    if kind == "cpu":
        return CpuAdapter()
    if kind == "null":
        return NullAdapter()
    if kind in ("cuda", "rocm", "tpu"):
        return DeviceAdapter(kind)
    raise ValueError(f"kind={kind!r}: expected cpu, cuda, rocm, tpu or null")


def _number(path: Path) -> int | None:
    """A limit's file as a number; None where it is missing or says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cache_line() -> int:
    try:
        size = os.sysconf("SC_LEVEL1_DCACHE_LINESIZE")
    except (ValueError, OSError):
        size = 0
    # Some kernels answer 0; 64 is the line of every x86-64 and most Arm cores.
    return size if size > 0 else 64


def _lock_limit() -> int:
    """Bytes that the process may lock."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return (1 << 62) if soft == resource.RLIM_INFINITY else soft


def _best(copy: Callable[[], Any]) -> float:
    """Bytes a second of the fastest of three copies; the first only warms up."""
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        copy()
        times.append(time.perf_counter() - begin)
    return _COPY_BYTES / max(min(times[1:]), 1e-9)


def _copy_bandwidth(copy: Callable[[np.ndarray, np.ndarray], Any]) -> float:
    source, target = np.ones(_COPY_BYTES, np.uint8), np.empty(_COPY_BYTES, np.uint8)
    return _best(lambda: copy(target, source))


def _device_bandwidth(device: Any) -> float:
    source = np.ones(_COPY_BYTES, np.uint8)
    return _best(lambda: jax.device_put(source, device).block_until_ready())
