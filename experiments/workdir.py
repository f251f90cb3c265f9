"""The directory of one run: what it was asked, what it measured, where it stands.

    config.json    {"program": name, "config": {...}}, written first
    env.json       versions and device; "plan": of the cache's memory, if one was made;
                   "resumed": those of later processes that differ
    metrics.jsonl  one object a line: "stage", "step" and the values
    tb/            the same values for TensorBoard, tag "stage/key"
    stages/*.json  {"stage": name, "result": {...}} of each finished stage
    summary.json   flat keys
    report.md, figures/

Every file but metrics.jsonl and tb/ appears whole or not at all, so that a run killed
at any moment resumes at the stage it did not finish.
"""

import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OWNED = (
    "config.json",
    "env.json",
    "metrics.jsonl",
    "tb",
    "stages",
    "checkpoints",
    "summary.json",
    "report.md",
    "figures",
)
"""Names in a run's directory that belong to the run; `overwrite` deletes only these."""

_STAGE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_ABSENT = object()


class WorkdirError(RuntimeError):
    """A run's directory cannot be used, or a file in it is not what it should be."""


def write_atomic(path: Path, text: str) -> None:
    """Writes a file whole or not at all, also when the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def first_difference(old: Any, new: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The first key, in the new value's order, at which two JSON values differ.

    Returns:
      (dotted key, old value, new value) with "(absent)" for a value that is missing,
      or None if they are equal.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *(key for key in old if key not in new)]:
            a, b = old.get(key, _ABSENT), new.get(key, _ABSENT)
            found = first_difference(a, b, f"{path}.{key}" if path else key)
            if found:
                return found
        return None
    if type(old) is type(new) and old == new:
        return None
    show = ["(absent)" if value is _ABSENT else value for value in (old, new)]
    return path, show[0], show[1]


def environment() -> dict[str, Any]:
    """What the numbers of a run depend on; no host name and no path of the machine."""
    import jax

    devices = jax.devices()
    return {
        "hybrid_attn": _version("hybrid_attn"),
        "git_revision": _git("rev-parse", "HEAD"),
        "git_modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "platform": platform.platform(),
        "device_platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "cpu_count": os.cpu_count(),
        "cpu_available": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "x64": bool(jax.config.read("jax_enable_x64")),
    }


class Workdir:
    """A run's directory, opened for a new run or to go on with the same one.

    Attributes:
      path: the directory.
      resumed: it already held this run.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        program: str,
        config: Mapping[str, Any],
        *,
        overwrite: bool = False,
    ) -> None:
        """Opens the directory; on an error nothing in it has changed.

        Args:
          path: made if missing.
          program: name of the program, compared with the config.
          config: values that JSON can hold; tuples count as lists.
          overwrite: delete another run's files (only the names in `OWNED`).

        Raises:
          WorkdirError: it holds another run, or files that are no run's.
        """
        self.path = Path(path)
        wanted = json.loads(_dumps({"program": program, "config": dict(config)}))
        self.resumed = self._holds(wanted, overwrite)
        self._writer: Any = None
        if not self.resumed:
            self._clear()
            write_atomic(self.path / "config.json", _dumps(wanted, indent=2) + "\n")
        self._write_environment()
        self._mend_metrics()

    def file(self, name: str) -> Path:
        """The path of a file in the directory; its parent exists afterwards."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def add_seconds(self, here: float) -> float:
        """Keeps the seconds of this process; returns those of all of the run's."""
        number = 0
        while self.is_done(f"process.{number}"):
            number += 1
        self.mark_done(f"process.{number}", {"seconds": here})
        return sum(self.result(f"process.{n}")["seconds"] for n in range(number + 1))

    def metrics(self, stage: str, step: int, **values: float | int | str) -> None:
        """Appends one line to metrics.jsonl and the numbers in it to tb/.

        A value that is not finite stands as null, since JSON has no name for it.
        """
        _check_stage(stage)
        line = {"stage": stage, "step": step} | {
            key: _plain(value) for key, value in values.items()
        }
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as stream:
            stream.write(_dumps(line) + "\n")
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self.path / "tb"))
        for key, value in line.items():
            if key not in ("stage", "step") and isinstance(value, int | float):
                self._writer.add_scalar(f"{stage}/{key}", value, step)

    def rewind_metrics(self, stage: str, step: int) -> None:
        """Drops the lines of a stage from `step` on: a resumed run writes them again.

        TensorBoard keeps the old points; it draws the later ones over them.
        """
        lines = self.read_metrics()
        kept = [x for x in lines if x["stage"] != stage or x["step"] < step]
        if len(kept) < len(lines):
            text = "".join(_dumps(line) + "\n" for line in kept)
            write_atomic(self.path / "metrics.jsonl", text)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl, in its order."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        with open(path, encoding="utf-8") as stream:
            return [json.loads(line) for line in stream]

    def is_done(self, stage: str) -> bool:
        """Whether the stage was marked as done, by this or an earlier process."""
        return self._stage(stage).exists()

    def mark_done(self, stage: str, result: Mapping[str, Any] | None = None) -> None:
        """Stores a stage's result; from now on a resumed run skips the stage.

        Raises:
          ValueError: a result that JSON cannot hold, or a number that is not finite.
        """
        record = {"stage": stage, "result": dict(result or {})}
        write_atomic(self._stage(stage), _dumps(record, indent=2) + "\n")

    def result(self, stage: str) -> dict[str, Any]:
        """The result that `mark_done` stored.

        Raises:
          WorkdirError: the stage is not done, or its file cannot be read.
        """
        path = self._stage(stage)
        if not path.exists():
            raise WorkdirError(f"stage {stage!r} is not done in {self.path}")
        return _load(path)["result"]

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json.

        Args:
          summary: flat; values are numbers, strings, booleans, None or lists of them.

        Raises:
          ValueError: a nested value, or a number that is not finite, by its key.
        """
        for key, value in summary.items():
            for item in value if isinstance(value, list | tuple) else [value]:
                if isinstance(item, float) and not math.isfinite(item):
                    raise ValueError(f"summary key {key!r} is {item}")
                if not isinstance(item, int | float | str | None):
                    raise ValueError(
                        f"summary key {key!r} holds {type(item).__name__}: the keys "
                        "are flat"
                    )
        write_atomic(self.path / "summary.json", _dumps(dict(summary), indent=2) + "\n")

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Adds the memory plan that this process uses to env.json.

        A resumed process that plans otherwise gets an entry of its own in "resumed".

        Raises:
          ValueError: a value that JSON cannot hold.
        """
        path = self.path / "env.json"
        record, plan = _load(path), json.loads(_dumps(dict(plan)))
        last = record.get("resumed", [record])[-1]
        if last.setdefault("plan", plan) != plan:
            last = {k: v for k, v in last.items() if k not in ("plan", "resumed")}
            record.setdefault("resumed", []).append(last | {"plan": plan})
        write_atomic(path, _dumps(record, indent=2) + "\n")

    def close(self) -> None:
        """Flushes TensorBoard's file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _holds(self, wanted: dict[str, Any], overwrite: bool) -> bool:
        """Whether the run is here already; refuses what belongs to somebody else."""
        if self.path.exists() and not self.path.is_dir():
            raise WorkdirError(f"{self.path} is a file; give a directory to --workdir")
        config = self.path / "config.json"
        if config.exists():
            found = first_difference(_load(config), wanted)
            if found is None:
                return not overwrite
            if overwrite:
                return False
            key, old, new = found
            raise WorkdirError(
                f"{self.path} holds another run: {key} is {old!r} there and {new!r} "
                "now; give another --workdir, delete it, or pass --overwrite"
            )
        for name in OWNED:
            if (self.path / name).exists():
                raise WorkdirError(
                    f"{self.path} has {name} but no config.json, so it is no run's "
                    "directory; give another --workdir"
                )
        return False

    def _clear(self) -> None:
        # config.json goes last: killed before that, the directory is still a run's.
        for name in reversed(OWNED):
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _write_environment(self) -> None:
        path = self.path / "env.json"
        now = environment()
        if path.exists():
            record = _load(path)
            last = record.get("resumed", [record])[-1]
            if all(last.get(key) == value for key, value in now.items()):
                return
            record.setdefault("resumed", []).append(now)
            now = record
        write_atomic(path, _dumps(now, indent=2) + "\n")

    def _mend_metrics(self) -> None:
        """Cuts off a last line that a killed process did not finish."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(path, len(whole))

    def _stage(self, stage: str) -> Path:
        _check_stage(stage)
        return self.path / "stages" / f"{stage}.json"


def _check_stage(stage: str) -> None:
    if not _STAGE.fullmatch(stage):
        raise ValueError(f"a stage is named by letters, digits, . _ and -: {stage!r}")


def _plain(value: Any) -> Any:
    """A NumPy or JAX scalar as Python's own; None for what is not finite."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _dumps(value: Any, indent: int | None = None) -> str:
    def scalar(item: Any) -> Any:
        if hasattr(item, "tolist"):
            return item.tolist()
        raise ValueError(f"JSON cannot hold {type(item).__name__}: {item!r}")

    return json.dumps(value, indent=indent, allow_nan=False, default=scalar)


def _load(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WorkdirError(
            f"{path} is not JSON ({error}); restore it, or give another --workdir"
        ) from error


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Output of git in this checkout, None where there is no git or no checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
