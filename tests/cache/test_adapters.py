"""Plans of described memories keep their limits; probing names what is missing."""

import dataclasses

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hybrid_attn as ha
from hybrid_attn.cache.adapters import (
    CpuAdapter,
    DescribedAdapter,
    DeviceAdapter,
    DeviceMemory,
    DoesNotFit,
    Footprint,
    NoSuchMemory,
    NullAdapter,
    memory_adapter,
    plan,
)
from hybrid_attn.cache.layout import layout_of
from hybrid_attn.cache.spec import make_spec

GIB = 1 << 30
MIB = 1 << 20
DEVICES = [
    DeviceMemory("cpu", "laptop", 8 * GIB, 3 * GIB, 4096, 64, 8e9, 64 * MIB),
    DeviceMemory("cpu", "apple", 16 * GIB, 9 * GIB, 16384, 128, 6e10, 512 * MIB),
    DeviceMemory("cpu", "numa", 1024 * GIB, 900 * GIB, 4096, 64, 1e11, 64 * GIB),
    DeviceMemory("cuda", "T4", 16 * GIB, 14 * GIB, 2 * MIB, 128, 1.2e10, 4 * GIB),
    DeviceMemory("cuda", "H100", 80 * GIB, 78 * GIB, 2 * MIB, 128, 5e10, 16 * GIB),
    DeviceMemory("cuda", "H200", 141 * GIB, 139 * GIB, 2 * MIB, 128, 5.5e10, 64 * GIB),
    DeviceMemory(
        "rocm", "MI300X", 192 * GIB, 190 * GIB, 2 * MIB, 128, 5.2e10, 32 * GIB
    ),
    DeviceMemory("tpu", "v5e", 16 * GIB, 15 * GIB, 4096, 256, 1.6e10, 8 * GIB),
    NullAdapter().probe(),
]
CONFIG = ha.ModelConfig(
    pattern="(swa,csa,hca)*8",
    head_dim=512,
    heads=8,
    rope_dims=64,
    window=128,
    index_dim=128,
)
SPEC = make_spec(CONFIG, 1 << 20, 16, "bfloat16")
ROWS = 64
PARAMETERS = int(1.5 * GIB)


def check_limits(memory, spec, parameters, found, rows=ROWS, reserve=0.1):
    assert found.block_tokens % spec.block_tokens == 0
    assert spec.capacity % found.block_tokens == 0
    assert found.disk_alignment % found.alignment == 0 and found.disk_alignment >= 4096
    assert found.alignment in (64, 128, 256)
    assert found.alignment % memory.line_bytes == 0
    assert found.slot_bytes % found.alignment == 0
    assert 0 < found.staging_bytes <= memory.pinned_limit
    assert found.staging_bytes % memory.page_bytes == 0
    assert found.staging_bytes >= 2 * found.slot_bytes
    assert 1 <= found.slots <= rows * (spec.capacity // found.block_tokens)
    used = parameters + found.recent_bytes + found.slots * found.slot_bytes
    if memory.kind == "cpu":
        used += found.staging_bytes
    assert used <= memory.free_bytes * (1 - reserve)


@pytest.mark.parametrize("memory", DEVICES[:-1], ids=lambda memory: memory.name)
def test_limits(memory):
    found = DescribedAdapter(memory).plan(SPEC, PARAMETERS, rows=ROWS)
    check_limits(memory, SPEC, PARAMETERS, found)
    assert found.slot_bytes >= Footprint.of_spec(SPEC).block_bytes


def test_plans_differ():
    plans = [plan(memory, SPEC, PARAMETERS, rows=ROWS) for memory in DEVICES]
    shape = [(p.block_tokens, p.slots, p.alignment, p.staging_bytes) for p in plans]
    assert len(set(shape)) == len(DEVICES)
    by_name = {p.device: p for p in plans}
    assert by_name["v5e"].alignment == 256 and by_name["T4"].alignment == 128
    assert by_name["H200"].slots > by_name["H100"].slots > by_name["T4"].slots
    assert by_name["H100"].block_tokens > by_name["laptop"].block_tokens


def test_null_keeps_nothing():
    found = NullAdapter().plan(SPEC, PARAMETERS)
    assert (found.slots, found.staging_bytes) == (0, 0)
    assert found.block_tokens == SPEC.block_tokens


@settings(max_examples=150, deadline=None)
@given(
    free=st.integers(1, 4 * GIB),
    pinned=st.integers(0, 256 * MIB),
    page=st.sampled_from([4096, 65536, 2 * MIB]),
    line=st.sampled_from([32, 64, 128, 256]),
    bandwidth=st.floats(1e6, 1e12),
    parameters=st.integers(0, GIB),
    kind=st.sampled_from(["cpu", "cuda"]),
)
def test_any_memory(free, pinned, page, line, bandwidth, parameters, kind):
    memory = DeviceMemory(kind, "any", 4 * GIB, free, page, line, bandwidth, pinned)
    try:
        found = plan(memory, SPEC, parameters, rows=ROWS)
    except DoesNotFit:
        return
    check_limits(memory, SPEC, parameters, found)


@pytest.mark.parametrize(
    ("changes", "parameters", "message"),
    [
        ({}, 15 * GIB, r"T4 \(cuda\): free_bytes=\d+: \d+ bytes of parameters"),
        ({"pinned_limit": 4096}, GIB, r"T4 \(cuda\): pinned_limit=4096: two blocks"),
        ({"line_bytes": 512}, GIB, r"line_bytes=512 divides none of the alignments"),
    ],
)
def test_names_the_limit(changes, parameters, message):
    memory = dataclasses.replace(DEVICES[3], **changes)
    with pytest.raises(DoesNotFit, match=message):
        plan(memory, SPEC, parameters, rows=ROWS)


def test_refuses():
    with pytest.raises(ValueError, match="rows=0"):
        plan(DEVICES[0], SPEC, 0, rows=0)
    with pytest.raises(ValueError, match="page_bytes=0"):
        dataclasses.replace(DEVICES[0], page_bytes=0)
    with pytest.raises(ValueError, match="free_bytes=-1"):
        dataclasses.replace(DEVICES[0], free_bytes=-1)
    with pytest.raises(ValueError, match="kind='gpu': expected cpu, cuda"):
        memory_adapter("gpu")


def test_footprint_of_a_layout():
    """The estimate from the spec agrees with the arrays but for index and shift."""
    config = CONFIG.replace(index_dim=512, pattern="swa,hca,csa", token_shift=False)
    cache = jax.eval_shape(lambda: ha.init_cache(config, 2, 512, dtypes="bfloat16"))
    exact = Footprint.of_layout(layout_of(cache))
    assert exact == Footprint.of_spec(cache.spec)


def test_cpu_probe():
    found = memory_adapter("cpu").probe()
    assert 0 < found.free_bytes <= found.total_bytes
    assert found.page_bytes >= 4096 and found.line_bytes in (32, 64, 128)
    assert found.copy_bandwidth > 1e7
    assert 0 <= found.pinned_limit <= found.free_bytes


def test_cpu_probe_keeps_to_the_control_group(tmp_path):
    (tmp_path / "proc").mkdir()
    with pytest.raises(NoSuchMemory, match="has no MemAvailable"):
        (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\n")
        CpuAdapter(tmp_path).probe()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    assert CpuAdapter(tmp_path).probe().total_bytes == 1000 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("100\n")
    assert CpuAdapter(tmp_path).probe().free_bytes == 900 << 10
    (group / "memory.max").write_text("5000\n")
    found = CpuAdapter(tmp_path).probe()
    assert (found.total_bytes, found.free_bytes) == (5000, 4900)
    with pytest.raises(NoSuchMemory, match=r"meminfo is missing"):
        CpuAdapter(tmp_path / "none").probe()


class _Device:
    device_kind = "some accelerator"

    def __init__(self, stats):
        self.memory_stats = lambda: stats


def test_device_probe():
    stats = {"bytes_limit": 16 * GIB, "bytes_in_use": GIB}
    for kind in ("cuda", "rocm", "tpu"):
        adapter = DeviceAdapter(kind, lambda _: [_Device(stats)], lambda _: 1e10)
        found = adapter.probe()
        assert (adapter.kind, found.kind) == (kind, kind)
        assert (found.total_bytes, found.free_bytes) == (16 * GIB, 15 * GIB)
        assert adapter.plan(SPEC, GIB).slots > 0


def test_device_probe_names_what_is_missing():
    for kind in ("cuda", "rocm", "tpu"):
        with pytest.raises(NoSuchMemory, match=f"{kind}: jax has no such device"):
            memory_adapter(kind).probe()
    for stats in (None, {"bytes_limit": 1}):
        missing = "bytes_in_use" if stats else "bytes_limit"
        adapter = DeviceAdapter("cuda", lambda _, s=stats: [_Device(s)])
        with pytest.raises(NoSuchMemory, match=f"some accelerator has no {missing}"):
            adapter.probe()
    with pytest.raises(ValueError, match="kind='cpu': expected one of cuda"):
        DeviceAdapter("cpu")
