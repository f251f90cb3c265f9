"""Runs `torch_side.py` in its own interpreter and reads its answer."""

import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

SCRIPT = Path(__file__).with_name("torch_side.py")
_PREFIX = "[torch] "
_FIGURES = ("prefill_tokens_per_s", "decode_ms_per_token")


class PeerFailed(RuntimeError):
    """The peer's process failed or gave an answer that is none."""


def parse_answer(text: str, names: Sequence[str]) -> dict:
    """Reads and checks the JSON answer of the peer.

    Args:
        text: its standard output.
        names: the cases that were asked for, in order.

    Returns:
        The answer.

    Raises:
        PeerFailed: no JSON, other cases, or a figure that is not above 0.
    """
    lines = text.strip().splitlines()
    try:
        answer = json.loads(lines[-1] if lines else "")
        found = [case["name"] for case in answer["cases"]]
        figures = [case[key] for case in answer["cases"] for key in _FIGURES]
        total = answer["parameters"]["parameters_total"]
    except (ValueError, KeyError, TypeError) as error:
        raise PeerFailed(
            f"the peer's answer is not the expected JSON: {error!r}"
        ) from error
    if found != list(names):
        raise PeerFailed(f"the peer measured {found}, asked for were {list(names)}")
    if not all(figure > 0 for figure in [*figures, total]):
        raise PeerFailed(f"the peer gave figures that are not above 0: {figures}")
    return answer


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for the peer: none that would load our packages into it."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {key: value for key, value in environ.items() if key not in ours}
    # The model is made from a config: nothing is to be looked up or downloaded.
    return {**kept, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def measure(
    python: Path,
    request: dict,
    say: Callable[[str], None],
    tick: Callable[[float], None] = lambda seconds: None,
) -> dict:
    """Measures the peer in a process of its own.

    Args:
        python: interpreter of the PyTorch environment.
        request: see `torch_side.py`.
        say: receives the peer's progress lines.
        tick: called every second or two with the seconds that have passed.

    Returns:
        The peer's answer.

    Raises:
        PeerFailed: it did not end well; carries the last lines that it wrote.
    """
    lines: queue.Queue[str | None] = queue.Queue()
    last: list[str] = []
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as answer:
        process = subprocess.Popen(
            [str(python), str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=answer,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(os.environ),
        )
        assert process.stdin and process.stderr
        threading.Thread(
            target=_forward, args=(process.stderr, lines), daemon=True
        ).start()
        try:
            _send(process.stdin, json.dumps(request))
            while True:
                try:
                    line = lines.get(timeout=2.0)
                except queue.Empty:
                    line = ""
                if line is None:
                    break
                if line.startswith(_PREFIX):
                    say(f"transformers: {line.removeprefix(_PREFIX)}")
                elif line:
                    last = [*last, line][-4:]
                tick(time.monotonic() - start)
            status = process.wait()
        finally:
            # Interrupted: the peer must not go on using every core.
            if process.poll() is None:
                process.kill()
                process.wait()
        answer.seek(0)
        text = answer.read()
    if status != 0:
        killed = " (killed: out of memory?)" if status == -9 else ""
        raise PeerFailed(
            f"{SCRIPT.name} ended with status {status}{killed}: {' | '.join(last)}"
        )
    return parse_answer(text, [case["name"] for case in request["cases"]])


def _send(stream: IO[str], text: str) -> None:
    try:
        stream.write(text)
        stream.close()
    except BrokenPipeError:
        # It is dead already; its status and its last lines tell more than this.
        pass


def _forward(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line.rstrip())
    lines.put(None)
