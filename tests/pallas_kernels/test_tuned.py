"""Tables of tuned configurations: choice of an entry, and files that are refused."""

import dataclasses
import json

import pytest

from pallas_kernels import tuned

KIND = "NVIDIA Test 80GB"


@dataclasses.dataclass(frozen=True)
class Config:
    block: int


LEGAL = tuple(Config(block) for block in (16, 32, 64))


def entry(
    block: int, microseconds: float | None = 1.0, op="op", **sizes
) -> tuned.Entry:
    return tuned.Entry(
        op=op,
        sizes=sizes,
        dtype="float32",
        config=None if microseconds is None else {"block": block},
        microseconds=microseconds,
    )


def write(directory, *entries: tuned.Entry, kind=KIND):
    table = tuned.Table(device_kind=kind, jax="0.12.0", entries=entries)
    return tuned.write(table, directory)


def choose(directory, legal=LEGAL, dtype="float32", op="op", kind=KIND, **sizes):
    return tuned.choose(op, sizes, dtype, legal, device_kind=kind, directory=directory)


def test_the_nearest_shape_decides(tmp_path):
    path = write(tmp_path, entry(16, t=64), entry(32, t=1024), entry(64, t=64, op="b"))
    assert path.name == "nvidia_test_80gb.json"
    assert choose(tmp_path, t=64) == Config(16)
    assert choose(tmp_path, t=100) == Config(16)
    assert choose(tmp_path, t=700) == Config(32)
    assert choose(tmp_path, t=64, op="b") == Config(64)


def test_no_entry_serves(tmp_path):
    write(tmp_path, entry(16, t=64), entry(32, None, t=4096))
    assert choose(tmp_path, t=64 * 8) == Config(16)
    assert choose(tmp_path, t=64 * 8 + 1) is None
    # Not measured, other axes, another dtype, operation or device.
    assert choose(tmp_path, t=4096) is None
    assert choose(tmp_path, t=64, h=1) is None
    assert choose(tmp_path, t=64, dtype="bfloat16") is None
    assert choose(tmp_path, t=64, op="c") is None
    assert choose(tmp_path, t=64, kind="NVIDIA Other") is None


def test_what_is_not_legal_leaves_it_to_the_next(tmp_path):
    write(tmp_path, entry(16, t=64), entry(32, t=128))
    assert choose(tmp_path, LEGAL[1:], t=64) == Config(32)
    assert choose(tmp_path, LEGAL[2:], t=64) is None


def test_a_table_round_trips_and_replaces_by_key(tmp_path):
    write(tmp_path, entry(16, t=64), entry(32, t=128))
    table = tuned.load(KIND, tmp_path)
    assert table is not None
    tuned.write(table.updated([entry(64, 0.5, t=64)], jax="0.12.1"), tmp_path)
    table = tuned.load(KIND, tmp_path)
    assert table is not None and table.jax == "0.12.1"
    assert [dict(each.sizes) for each in table.entries] == [{"t": 64}, {"t": 128}]
    assert table.entries[0].config == {"block": 64}
    assert choose(tmp_path, t=64) == Config(64)


def test_what_is_asked_and_what_is_assumed(tmp_path):
    write(tmp_path, entry(16, t=64))
    with tuned.recorded() as asked, tuned.assumed({"op": Config(64), "b": None}):
        assert choose(tmp_path, t=64) == Config(64)
        assert choose(tmp_path, t=64, op="b") is None
        with pytest.raises(ValueError, match="not legal"):
            choose(tmp_path, LEGAL[:1], t=64)
    assert choose(tmp_path, t=64) == Config(16)
    assert asked[0] == tuned.Question("op", {"t": 64}, "float32", LEGAL)
    assert [question.op for question in asked] == ["op", "b", "op"]


def changed(**keys):
    def edit(data):
        return data | keys

    return edit


def changed_entry(**keys):
    def edit(data):
        return data | {"entries": [data["entries"][0] | keys]}

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (changed(version=2), "version 2, expected 1"),
        (changed(format="other"), "format"),
        (changed(more=1), "keys"),
        (changed(device_kind="NVIDIA Other"), "expected 'NVIDIA Test 80GB'"),
        (changed(entries=[{}]), "entry 0: keys"),
        (changed_entry(sizes={"t": 0}), "sizes"),
        (changed_entry(config={}), "config"),
        (changed_entry(microseconds=None), "without microseconds"),
        (changed_entry(config=None), "without microseconds"),
        (changed_entry(microseconds=-1.0), "above 0"),
        (changed_entry(op=3), "names"),
        (lambda data: data | {"entries": 2 * data["entries"]}, "two entries"),
        (lambda data: [data], "format"),
    ],
)
def test_a_damaged_or_foreign_table_names_its_file(tmp_path, edit, message):
    path = write(tmp_path, entry(16, t=64))
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(tuned.TableError, match=message) as caught:
        choose(tmp_path, t=64)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("data", [b"", b'{"format": ', b"\xff\xfe"])
def test_no_json(tmp_path, data):
    path = write(tmp_path, entry(16, t=64))
    path.write_bytes(data)
    with pytest.raises(tuned.TableError, match=path.name):
        choose(tmp_path, t=64)


def test_shipped_tables_are_whole():
    for path in tuned.DIRECTORY.glob("*.json"):
        table = tuned.parse(path.read_text(), str(path))
        assert tuned.path_of(table.device_kind) == path
