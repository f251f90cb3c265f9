"""Data: the definitions hold, batches repeat, and nothing leaks."""

import numpy as np
import pytest

from hybrid_attn.training.data import (
    BUCKETS,
    IGNORE,
    NeedleTask,
    NoTextError,
    RecallTask,
    TextData,
    buckets,
)

TASKS = {
    "offset": RecallTask(),
    "aligned": RecallTask(layout="aligned"),
    "no near": RecallTask(near_queries=0),
    "more queries than pairs": RecallTask(pairs=4, queries=11, near_queries=3),
    "forgetting": RecallTask(forgetting=True),
    "forgetting, odd": RecallTask(forgetting=True, pairs=7, queries=9, near_queries=4),
    "shortest": RecallTask(length=RecallTask().shortest_length),
    "wide": RecallTask(vocab=128, pairs=24, queries=20, length=256, near_window=16),
}


def queries(batch):
    """(row, position) of every query."""
    return np.argwhere(batch.targets != IGNORE)


def written(tokens, position, vocab):
    """Reads a row as a model must: the last value written to each key, and where."""
    memory = {}
    for at in range(position):
        if 0 < tokens[at] < vocab // 2 and tokens[at + 1] >= vocab // 2:
            memory[int(tokens[at])] = (int(tokens[at + 1]), at + 1)
    return memory


@pytest.mark.parametrize("name", TASKS)
def test_target_is_the_last_value_written_to_the_key(name):
    task = TASKS[name]
    batch = task.batch(3, 5, 24)
    assert [a.shape for a in batch[:3]] == [(24, task.length)] * 3
    assert [a.dtype for a in batch[:3]] == [np.int32] * 3
    near = task.near_queries if task.layout == "offset" else 0
    assert len(queries(batch)) == 24 * (task.queries + near)
    assert np.array_equal(batch.distance > 0, batch.targets != IGNORE)
    for row, at in queries(batch):
        tokens = batch.tokens[row]
        value, where = written(tokens, at, task.vocab)[int(tokens[at])]
        assert value == batch.targets[row, at]
        assert at - where == batch.distance[row, at]


@pytest.mark.parametrize("name", TASKS)
def test_row_has_the_stated_form(name):
    task = TASKS[name]
    batch = task.batch(0, 0, 200)
    half = task.vocab // 2
    values = batch.tokens >= half
    assert batch.tokens.min() == 0 and batch.tokens.max() < task.vocab
    assert np.array_equal(values.sum(1), np.full(200, task.pairs))
    for row in batch.tokens:
        assert len(set(row[row >= half])) == task.pairs
    keys = (batch.tokens > 0) & ~values & (batch.targets == IGNORE)
    # Each write is a key directly followed by a value; the rest are queries.
    assert np.array_equal(keys[:, :-1], values[:, 1:])
    first = np.argmax(batch.tokens > 0, axis=1)
    if task.layout == "aligned":
        assert not first.any()
        assert values[:, 1 : 2 * task.pairs : 2].all()
    else:
        assert set(first) == set(range(task.max_offset))
        for bucket in range(2):  # both parities of place and of distance
            assert (first % 2 == bucket).mean() > 0.3
            assert (batch.distance[batch.distance > 0] % 2 == bucket).mean() > 0.2


def test_each_pair_is_asked_far_before_any_is_asked_again():
    task = RecallTask(near_queries=0, queries=12)
    batch = task.batch(1, 2, 30)
    for row in range(30):
        asked = batch.tokens[row][batch.targets[row] != IGNORE]
        assert len(set(asked)) == task.pairs
        assert np.unique(asked, return_counts=True)[1].max() == 2


def test_near_queries_are_near_and_inside_the_block():
    task = RecallTask()
    batch = task.batch(0, 1, 300)
    for row in range(300):
        last = np.flatnonzero(batch.tokens[row] >= task.vocab // 2)[-1]
        # The query after the last pair, if there is one, still belongs to the block.
        distance = batch.distance[row, : last + 1]
        assert task.near_queries - 1 <= (distance > 0).sum() <= task.near_queries
        assert distance.max() <= task.near_window - 1


def test_far_gaps_follow_the_power_law():
    task = RecallTask(
        pairs=1, queries=1, near_queries=0, max_offset=1, length=131, power=0.5
    )
    batch = task.batch(0, 0, 20_000)
    gap = (batch.distance[batch.distance > 0] - 1) // 2
    space = 64
    expected = np.arange(1, space + 1) ** (task.power - 1)
    measured = np.bincount(gap, minlength=space)[:space] / len(gap)
    assert np.abs(measured - expected / expected.sum()).max() < 0.006


@pytest.mark.parametrize("layout", ["offset", "aligned"])
def test_every_bucket_occurs(layout):
    batch = RecallTask(layout=layout).batch(0, 0, 64)
    for layers in (2, 3):
        counts = {k: v.sum() for k, v in buckets(batch.distance, 8, layers).items()}
        assert set(counts) == set(BUCKETS)
        assert sum(counts.values()) == len(queries(batch))
        assert min(counts.values()) >= 32
        assert counts["beyond_reach"] >= 64 * 4


def test_buckets_cut_where_stated():
    distance = np.arange(20)
    masks = buckets(distance, 8, 2)
    assert distance[masks["in_window"]].tolist() == list(range(1, 8))
    assert distance[masks["beyond_window"]].tolist() == list(range(8, 15))
    assert distance[masks["beyond_reach"]].tolist() == list(range(15, 20))
    shifted = buckets(distance, 8, 2, token_shift=1)
    assert distance[shifted["beyond_reach"]].tolist() == [17, 18, 19]
    alone = buckets(distance, 1, 1)
    assert not alone["in_window"].any() and alone["beyond_reach"].sum() == 19
    with pytest.raises(ValueError, match="window 0, layers 2"):
        buckets(distance, 0, 2)


def test_value_cannot_be_guessed_without_recall():
    """Unigram, bigram and copying predictors, fitted on another seed, stay at chance.

    Chance for the values of a key over rows is 1/32; copying the value last seen or
    any value seen is right no more often than the number of candidates says.
    """
    task = RecallTask()
    fit, test = task.batch(0, 0, 4000), task.batch(10, 0, 1000)
    table = np.zeros((task.vocab, task.vocab))
    at = queries(fit)
    previous = np.zeros((task.vocab, task.vocab))
    for row, j in at:
        table[fit.tokens[row, j], fit.targets[row, j]] += 1
        previous[fit.tokens[row, j - 1], fit.targets[row, j]] += 1
    hits = {"key": [], "unigram": [], "position": [], "last": [], "bigram": []}
    by_place = np.zeros((task.length, task.vocab))
    np.add.at(by_place, (at[:, 1], fit.targets[at[:, 0], at[:, 1]]), 1)
    for row, j in queries(test):
        want, tokens = test.targets[row, j], test.tokens[row]
        seen = tokens[:j][tokens[:j] >= task.vocab // 2]
        far = test.distance[row, j] > 14
        hits["key"].append(table[tokens[j]].argmax() == want)
        hits["unigram"].append(table.sum(0).argmax() == want)
        hits["position"].append(by_place[j].argmax() == want)
        if tokens[j - 1] < task.vocab // 2:  # else the token before is the answer
            hits["bigram"].append(previous[tokens[j - 1]].argmax() == want)
        hits["last"].append((far, seen[-1] == want))
    for name in ("key", "unigram", "position", "bigram"):
        assert np.mean(hits[name]) < 0.05, name
    far, copied = np.array(hits["last"]).T
    assert copied[far == 1].mean() < 1.2 / task.pairs
    assert copied[far == 0].mean() < 0.45


def test_forgetting_row_rewrites_half_of_the_writes():
    task = RecallTask(forgetting=True)
    batch = task.batch(0, 0, 50)
    stale = 0
    for row, at in queries(batch):
        tokens = batch.tokens[row]
        writes = [
            tokens[i + 1]
            for i in range(at)
            if tokens[i] == tokens[at] and tokens[i + 1] >= task.vocab // 2
        ]
        stale += writes[0] != batch.targets[row, at]
    assert stale / len(queries(batch)) > 0.3
    for row in range(50):
        keys = batch.tokens[row][np.flatnonzero(batch.tokens[row] >= 32) - 1]
        assert len(set(keys)) == task.pairs - task.pairs // 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 60}, "length 60 is too short: .* need 70"),
        ({"layout": "textbook"}, "layout is 'textbook'"),
        ({"vocab": 63}, "vocab must be even"),
        ({"pairs": 32}, "pairs must be 1..31, got 32"),
        ({"near_queries": 8}, "near_queries must be 0..pairs-1 = 0..7, got 8"),
        ({"near_window": 1}, "near_window must be at least 2"),
        ({"power": 0.0}, "power must be above 0"),
    ],
)
def test_recall_task_that_cannot_exist_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RecallTask(**fields)


@pytest.mark.parametrize("haystack", ["noise", "filler"])
@pytest.mark.parametrize("distance", [1, 50, 126, None])
def test_needle(haystack, distance):
    task = NeedleTask(haystack=haystack)
    batch = task.batch(0, 1, 300, distance)
    assert np.array_equal(queries(batch), [[row, 127] for row in range(300)])
    back = batch.distance[:, -1]
    assert set(back) == {distance} if distance else len(set(back)) > 80
    for row in range(300):
        tokens, key = batch.tokens[row], batch.tokens[row, -1]
        assert 0 < key < 32
        assert np.flatnonzero(tokens == key).tolist() == [126 - back[row], 127]
        assert tokens[127 - back[row]] == batch.targets[row, -1] >= 32
    if haystack == "noise":
        assert set(batch.tokens.flat) == set(range(1, 64))
    else:
        assert ((batch.tokens > 0).sum(1) == 3).all()


def test_needle_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"distance must be 1..126 .* got 127"):
        NeedleTask().batch(0, 0, 1, 127)
    with pytest.raises(ValueError, match="haystack is 'hay'"):
        NeedleTask(haystack="hay")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="length must be at least 3"):
        NeedleTask(length=2)
    with pytest.raises(ValueError, match="vocab must be even"):
        NeedleTask(vocab=7)


@pytest.fixture(scope="module")
def library():
    return TextData()


@pytest.fixture(scope="module")
def sources(library):
    return {
        "recall": RecallTask().batch,
        "aligned": RecallTask(layout="aligned").batch,
        "needle": NeedleTask().batch,
        "text": lambda *at: library.batch(*at, length=64),
    }


@pytest.mark.parametrize("name", ["recall", "aligned", "needle", "text"])
def test_batch_depends_on_seed_and_step_alone(sources, name):
    make = sources[name]
    first = make(7, 3, 4)
    make(0, 0, 2)
    for a, b in zip(first, make(7, 3, 4), strict=True):
        assert np.array_equal(a, b)
    for seed, step in ((7, 4), (8, 3), (3, 7)):
        assert not np.array_equal(first.tokens, make(seed, step, 4).tokens)
    with pytest.raises(ValueError, match="at least 0, got seed 0 and step -1"):
        make(0, -1, 4)


def test_library_text(library):
    description = library.describe()
    share = description["heldout_bytes"] / description["train_bytes"]
    assert 0.02 < share < 0.12
    assert len(library.train_bytes) > 2**22
    assert not set(library.train_files) & set(library.heldout_files)
    for name in library.train_files + library.heldout_files:
        assert name.endswith(".py") and not name.startswith("/")
        assert not {"test", "tests", "site-packages"} & set(name.split("/"))
    assert description == TextData().describe()
    for at in library.train_bytes, library.heldout_bytes:
        assert at.dtype == np.uint8


def test_text_batch_is_a_crop_of_train_alone(library):
    batch = library.batch(0, 0, 3, 200)
    assert batch.tokens.shape == (3, 200) and batch.tokens.dtype == np.int32
    assert np.array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert not batch.distance.any()
    train, heldout = library.train_bytes.tobytes(), library.heldout_bytes.tobytes()
    for row in batch.tokens:
        crop = row.astype(np.uint8).tobytes()
        assert crop in train
        assert crop not in heldout


def test_heldout_windows_cover_the_split_once(tmp_path):
    text = bytes(range(33, 123)) * 3
    (tmp_path / "only.txt").write_bytes(text)
    data = TextData(tmp_path / "only.txt", heldout_percent=40)
    assert data.train_bytes.tobytes() + data.heldout_bytes.tobytes() == text
    batches = list(data.heldout(10, size=4))
    assert [batch.tokens.shape for batch in batches] == [(4, 10)] * 3
    targets = np.concatenate([batch.targets for batch in batches])
    kept = targets[(targets != IGNORE).all(1)]
    assert len(kept) == 10 and (targets[10:] == IGNORE).all()
    assert kept.astype(np.uint8).tobytes() == data.heldout_bytes[1:101].tobytes()
    (few,) = data.heldout(10, size=3, windows=3)
    assert few.tokens[:, 0].tolist() == [
        int(data.heldout_bytes[i]) for i in (0, 30, 60)
    ]
    for a, b in zip(batches, data.heldout(10, size=4), strict=True):
        assert np.array_equal(a.tokens, b.tokens)


def write(directory, **files):
    for name, text in files.items():
        (directory / f"{name}.txt").write_text(text)


def test_split_by_file_is_stable_when_files_are_added(tmp_path):
    write(tmp_path, **{f"f{i}": f"<{i}>" * 5 for i in range(60)})
    before = TextData(tmp_path, heldout_percent=20)
    assert len(before.train_files) + len(before.heldout_files) == 60
    assert 2 <= len(before.heldout_files) <= 25
    write(tmp_path, **{f"g{i}": "new" for i in range(20)})
    after = TextData(str(tmp_path), heldout_percent=20)
    assert set(before.heldout_files) <= set(after.heldout_files)
    assert set(before.train_files) <= set(after.train_files)
    globbed = TextData(str(tmp_path / "f*.txt"), heldout_percent=20)
    assert globbed.describe()["sha256"] == before.describe()["sha256"]


@pytest.mark.parametrize("percent", [0.01, 99.99])
def test_no_split_stays_empty(tmp_path, percent):
    write(tmp_path, a="aaaa", b="bbbb", c="cccc")
    data = TextData(tmp_path, heldout_percent=percent)
    assert data.train_files and data.heldout_files
    assert len(data.train_files) + len(data.heldout_files) == 3


def test_memory_is_capped_by_whole_files(tmp_path):
    write(tmp_path, **{f"f{i}": str(i) * 100 for i in range(10)})
    data = TextData(tmp_path, max_bytes=350)
    assert len(data.train_files) + len(data.heldout_files) == 3
    write(tmp_path, one="x" * 1000)
    assert len(TextData(tmp_path / "one.txt", max_bytes=200).train_bytes) == 190


def test_hidden_and_binary_files_are_not_text(tmp_path):
    write(tmp_path, a="text", b="more text")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    data = TextData(tmp_path)
    assert sorted(data.train_files + data.heldout_files) == ["a.txt", "b.txt"]


def test_missing_text_is_named(tmp_path):
    for path in (tmp_path / "absent", tmp_path, tmp_path / "*.md"):
        with pytest.raises(NoTextError, match=path.name.replace("*", r"\*")):
            TextData(path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(NoTextError, match="every file is empty"):
        TextData(tmp_path)


def test_bad_text_arguments_are_named(tmp_path):
    write(tmp_path, a="abcdefghij" * 4)
    data = TextData(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="train split has 38 bytes: windows of 64"):
        data.batch(0, 0, 1, 64)
    with pytest.raises(ValueError, match="held-out split has 2 bytes"):
        next(data.heldout(8))
    with pytest.raises(ValueError, match="length must be at least 1"):
        data.batch(0, 0, 1, 0)
    with pytest.raises(ValueError, match="heldout_percent"):
        TextData(tmp_path, heldout_percent=0)


def test_description_names_no_path_of_the_machine(library, tmp_path):
    write(tmp_path, a="abc", b="def")
    assert str(tmp_path) not in str(TextData(tmp_path).describe())
    assert library.describe()["source"] == "standard library"
