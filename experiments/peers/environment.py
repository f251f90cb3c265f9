"""The PyTorch environment of the peer: found, or made at first use.

It is separate because the peer's versions are pinned and need Python 3.11, on
which the newest jax does not run.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

REQUIREMENTS = {"torch": "2.13.0", "transformers": "5.24.0"}
PYTHON_VERSION = (3, 11)
# Written last: a directory without it is an installation that was cut short.
MARKER = "peers-environment.json"

_PROBE = (
    "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2], sys.executable)"
)
_VERSIONS = (
    "import importlib.metadata as m, json, sys;"
    "d = {p.metadata['Name'].lower(): p.version for p in m.distributions()};"
    "d['python'] = '%d.%d' % sys.version_info[:2]; print(json.dumps(d))"
)


class EnvironmentProblem(RuntimeError):
    """The environment cannot be found or made; the message is one clear line."""


def _ask(command: Sequence[str], timeout: float = 60.0) -> str | None:
    """Standard output of a command, or None where it fails to run."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def probe(python: str) -> str:
    """Runs an interpreter and asks what it is.

    A file on the search path proves nothing: pyenv's shims exist for every
    version and fail when run.

    Returns:
        "" where it is CPython of `PYTHON_VERSION` that can make environments,
        otherwise what is wrong with it.
    """
    answer = _ask([python, "-c", _PROBE])
    if answer is None:
        return "does not run, or has no venv and ensurepip"
    wanted = ".".join(map(str, PYTHON_VERSION))
    found = answer.split(" ", 1)[0]
    return "" if found == wanted else f"is Python {found}"


def pyenv_interpreters(environ: Mapping[str, str]) -> list[str]:
    """Interpreters of the wanted version in pyenv's directories, newest first."""
    wanted = ".".join(map(str, PYTHON_VERSION))
    found: dict[str, tuple[int, ...]] = {}
    home = environ.get("HOME")
    roots = [environ.get("PYENV_ROOT"), f"{home}/.pyenv" if home else None]
    for root in filter(None, roots):
        for python in Path(root).glob(f"versions/{wanted}.*/bin/python"):
            patch = python.parts[-3].rsplit(".", 1)[-1]
            if patch.isdigit():
                found.setdefault(str(python), (int(patch),))
    return sorted(found, key=lambda path: found[path], reverse=True)


def find_python(environ: Mapping[str, str] | None = None) -> str:
    """Finds the interpreter for the environment.

    Order: $PEERS_PYTHON, python3.11, python3, pyenv's version directories.

    Returns:
        Path of an interpreter that was run and is of the right version.

    Raises:
        EnvironmentProblem: none fits; names every candidate and its fault.
    """
    environ = os.environ if environ is None else environ
    wanted = ".".join(map(str, PYTHON_VERSION))
    explicit = environ.get("PEERS_PYTHON")
    if explicit:
        # A named interpreter is used or refused, never replaced by another.
        fault = probe(explicit)
        if fault:
            raise EnvironmentProblem(
                f"PEERS_PYTHON={explicit} {fault}; Python {wanted} is needed"
            )
        return explicit
    faults = []
    for name in (f"python{wanted}", "python3", *pyenv_interpreters(environ)):
        path = shutil.which(name, path=environ.get("PATH"))
        fault = probe(path) if path else "is not on PATH"
        if path and not fault:
            return path
        faults.append(f"{name} {fault}")
    raise EnvironmentProblem(
        f"no Python {wanted} for the PyTorch peer ({', '.join(faults)});"
        " name one with PEERS_PYTHON=/path/to/python3.11"
    )


def interpreter(directory: Path) -> Path:
    """The interpreter inside an environment."""
    return directory / "bin" / "python"


def missing_requirements(directory: Path) -> list[str]:
    """What an environment lacks, as readable phrases; empty where it fits."""
    answer = _ask([str(interpreter(directory)), "-c", _VERSIONS])
    if answer is None:
        return ["an interpreter that runs"]
    versions = json.loads(answer)
    faults = []
    for name, wanted in REQUIREMENTS.items():
        # "2.13.0+cpu" is the same release, built for another device.
        found = versions.get(name, "none").split("+")[0]
        if found != wanted:
            faults.append(f"{name}=={wanted} (found {found})")
    return faults


def _run_visibly(command: Sequence[str], what: str) -> None:
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EnvironmentProblem(f"{what} failed: {error}") from error


def ensure(
    directory: Path,
    *,
    own: bool,
    say: Callable[[str], None] = print,
    find: Callable[[], str] = find_python,
    run: Callable[[Sequence[str], str], None] = _run_visibly,
    requirements: Iterable[str] | None = None,
) -> Path:
    """Returns the interpreter of a fitting environment, making it where it is ours.

    Args:
        directory: where the environment is or shall be.
        own: the default directory, which may be cleared and made anew when an
            installation in it was cut short; a directory that the caller named
            is only filled where it is absent or empty.
        say: receives progress lines.
        find: finds the base interpreter.
        run: runs an installation command.
        requirements: what to install; `REQUIREMENTS` unless given.

    Returns:
        Path of the interpreter.

    Raises:
        EnvironmentProblem: no interpreter, a failed installation, or a named
            directory that holds something else.
    """
    occupied = directory.exists() and any(directory.iterdir())
    if occupied and (not own or (directory / MARKER).exists()):
        faults = missing_requirements(directory)
        if not faults:
            return interpreter(directory)
        if not own:
            raise EnvironmentProblem(
                f"--torch_env={directory} lacks {', '.join(faults)}; install it there"
                " or leave the flag out to have an environment made"
            )
    pins = list(requirements or (f"{k}=={v}" for k, v in REQUIREMENTS.items()))
    base = find()
    say(f"making the PyTorch environment {directory} with {base}")
    run([base, "-m", "venv", "--clear", str(directory)], "making the environment")
    say(f"installing {' '.join(pins)}: a download of several minutes")
    pip = [str(interpreter(directory)), "-m", "pip"]
    quiet = ["--disable-pip-version-check", "--progress-bar", "off"]
    run([*pip, "install", *quiet, *pins], "installing PyTorch and transformers")
    marker = directory / MARKER
    marker.write_text(json.dumps({"requirements": pins}) + "\n", encoding="utf-8")
    return interpreter(directory)
