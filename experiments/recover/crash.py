"""kill -9 while decoding: what is lost, and how long until the next right token."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from experiments.recover.config import Crash
from experiments.recover.crash_worker import decode

_ROOT = Path(__file__).resolve().parents[2]


class Decoder:
    """A `crash_worker` process and what it said so far.

    Attributes:
      acknowledged, made: tokens of each step, [steps][rows].
      restored: the line of that event, None where it began from nothing.
      first: seconds (`time.perf_counter`) of its first new token.
    """

    def __init__(self, request: dict):
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        self.acknowledged: list[list[int]] = []
        self.made: list[list[int]] = []
        self.restored: dict | None = None
        self.first: float | None = None
        self.ended = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.recover.crash_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=_ROOT,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.close()

    def read(self, until: Callable[["Decoder"], bool]) -> None:
        """Takes in what the process says until a condition holds or it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                return  # it was killed within a line
            said = json.loads(line)
            if said["event"] == "restored":
                self.restored = said
            elif said["event"] == "end":
                self.ended = True
            else:
                if self.first is None:
                    self.first = time.perf_counter()
                kept = self.made if said["event"] == "made" else self.acknowledged
                kept.append(said["tokens"])
            if until(self):
                return

    def kill(self) -> float:
        """kill -9; returns when. What it had said before is read to the end."""
        self._process.kill()
        at = time.perf_counter()
        self._process.wait()
        self.read(lambda _: False)
        return at

    def wait(self) -> None:
        """To its own end.

        Raises:
          RuntimeError: it failed.
        """
        self.read(lambda _: False)
        if self._process.wait() or not self.ended:
            raise RuntimeError("the decoding process failed")


def run_kills(
    directory: Path,
    model: str,
    settings: Crash,
    seed: int,
    report: Callable[[float, str], None],
) -> dict:
    """Kills a decoding process again and again, and compares with one never killed.

    Returns:
      kills; tokens_lost: acknowledged tokens that a restarted process did not have, or
      had otherwise; tokens_unacknowledged_lost: known to the killed process, and not
      yet durable; tokens_wrong: tokens of the whole run that differ from the run that
      was never killed; tokens_compared; mttr_seconds: from kill to the first new token
      of the restarted process, its start and compilation included, the mean, and
      mttr_seconds_max.
    """
    shutil.rmtree(directory, ignore_errors=True)
    request = {
        "model": model,
        "seed": seed,
        "rows": settings.rows,
        "context": settings.context,
        "tokens": settings.tokens,
        "every_tokens": settings.snapshot_tokens,
    }
    chance = random.Random(seed)
    try:
        whole: list[dict] = []
        decode(
            {**request, "path": str(directory / "whole")},
            lambda **line: whole.append(line),
        )
        want = [line["tokens"] for line in whole if line["event"] == "ack"]
        report(0.3, "the run that is never killed")
        request["path"] = str(directory / "killed")
        # Apart from each other, so that every process makes some tokens.
        span = settings.tokens // (settings.kills + 1)
        got: list[list[int]] = []  # acknowledged, by whichever process
        lost = unacknowledged = 0
        repairs = []
        killed: float | None = None
        held: list[list[int]] = []
        for number in range(settings.kills + 1):
            decoder = Decoder(request)
            last = number == settings.kills
            count = chance.randrange(max(1, span - 1)) + 1
            decoder.read(
                lambda d, n=count: d.first is not None and len(d.acknowledged) >= n
            )
            if killed is not None:
                assert decoder.restored is not None, "no checkpoint was found"
                assert decoder.first is not None, "no token after a restart"
                repairs.append(decoder.first - killed)
                kept = list(map(list, zip(*decoder.restored["tokens"], strict=True)))
                wrong = sum(kept[i : i + 1] != [tokens] for i, tokens in enumerate(got))
                lost += wrong * settings.rows
                unacknowledged += max(0, len(held) - len(kept)) * settings.rows
                got = kept
            if last:
                decoder.wait()
            else:
                # Anywhere within a step, its record or its snapshot.
                time.sleep(chance.uniform(0, 0.05))
                killed = decoder.kill()
            held = got + decoder.made
            got = got + decoder.acknowledged
            report(0.3 + 0.7 * (number + 1) / (settings.kills + 1), "killed")
        same = [a != b for a, b in zip(got, want, strict=False)]
        wrong = sum(same) + abs(len(got) - len(want))
        return {
            "kills": settings.kills,
            "tokens_lost": lost,
            "tokens_unacknowledged_lost": unacknowledged,
            "tokens_wrong": wrong * settings.rows,
            "tokens_compared": len(want) * settings.rows,
            "mttr_seconds": sum(repairs) / len(repairs),
            "mttr_seconds_max": max(repairs),
        }
    finally:
        shutil.rmtree(directory, ignore_errors=True)
