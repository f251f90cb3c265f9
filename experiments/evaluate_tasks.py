"""Perplexity, needle recall and greedy text of any model with a tokenizer.

`evaluate_model` is the entry: it needs no directory and no program, so that models
that were converted or trained elsewhere are measured in the same way.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import hybrid_attn as ha
from experiments.evaluate_config import EvaluateSettings
from experiments.runner import ConfigError
from hybrid_attn.step import pure_step
from hybrid_attn.training.data import TextData

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# (task, share of it that is done, a word about it).
Report = Callable[[str, float, str], None]
COLOURS = "red blue green yellow black white purple orange golden silver".split()
THINGS = "door gate bridge tower garden river castle lantern wagon mirror".split()


class Results(Protocol):
    """What is done, by name ("text.3", "needle.4096.0", "generate"); a dict serves."""

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> dict[str, Any]: ...

    def __setitem__(self, name: str, result: dict[str, Any], /) -> None: ...


def evaluate_model(
    config: ha.ModelConfig,
    model: ha.Model,
    tokenizer: "Tokenizer",
    settings: EvaluateSettings,
    *,
    results: Results | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Measures a model through its cache: every token goes through `step`.

    Args:
      config, model: any architecture; its vocabulary is the tokenizer's.
      results: pieces that are done already, and where new ones go; None for neither.
      report: called as the tasks proceed.

    Returns:
      The flat keys of `summarise`.

    Raises:
      ConfigError: a tokenizer with more tokens than the model, or too little text.
    """
    results = {} if results is None else results
    report = report or (lambda task, share, note: None)
    most = tokenizer.get_vocab_size()
    if most > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {most} tokens, the model {config.vocab_size}"
        )
    run = Evaluation(config, model, tokenizer, settings, results, report)
    for task in run.tasks:
        getattr(run, task)()
    return summarise(settings, results)


def summarise(settings: EvaluateSettings, results: Results) -> dict[str, Any]:
    """The flat keys of what is done.

    Returns:
      ``text.perplexity`` (of a token), ``text.nats_per_token``,
      ``text.bits_per_byte``, ``text.tokens``, ``text.nats.A_B`` (mean at positions A
      up to B); ``needle.recall`` (share of needles whose every token is the model's
      first choice), ``needle.recall.L`` for haystacks of L tokens,
      ``needle.recall.L.D`` at D per cent depth, ``needle.nats.L`` (of an answer's
      token); ``generate.text``, ``generate.tokens``.
    """
    keys: dict[str, Any] = {}
    windows = [results[f"text.{i}"] for i in range(settings.text.windows)]
    if windows:
        nats, tokens = (sum(w[k] for w in windows) for k in ("nats", "tokens"))
        keys["text.perplexity"] = math.exp(nats / tokens)
        keys["text.nats_per_token"] = nats / tokens
        keys["text.bits_per_byte"] = (
            nats / math.log(2) / sum(w["bytes"] for w in windows)
        )
        keys["text.tokens"] = tokens
        for index, (low, high, _) in enumerate(windows[0]["bins"]):
            total = sum(w["bins"][index][2] for w in windows)
            keys[f"text.nats.{low}_{high}"] = total / ((high - low) * len(windows))
    needle, everything = settings.needle, []
    for length in needle.lengths:
        asked = [results[f"needle.{length}.{i}"]["asked"] for i in range(needle.trials)]
        rows = [row for one in asked for row in one]
        everything += [row["found"] for row in rows]
        keys[f"needle.recall.{length}"] = float(np.mean([r["found"] for r in rows]))
        keys[f"needle.nats.{length}"] = float(np.mean([r["nats"] for r in rows]))
        for index, depth in enumerate(needle.depths):
            found = [one[index]["found"] for one in asked]
            keys[f"needle.recall.{length}.{percent(depth)}"] = float(np.mean(found))
    if everything:
        keys["needle.recall"] = float(np.mean(everything))
    if settings.generate.tokens:
        done = results["generate"]
        keys |= {f"generate.{key}": done[key] for key in ("text", "tokens")}
    return keys


def percent(depth: float) -> int:
    return round(100 * depth)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _score(graph, params, cache, tokens, targets, count):
    """(nats of the targets, first choices, cache); compiled once for equal graphs."""
    model = nnx.merge(graph, params)
    logits, cache, _ = pure_step(model, cache, tokens, count)
    assert logits is not None  # all of them by default
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - chosen
    return nats[0], jnp.argmax(logits, axis=-1)[0], cache


@dataclasses.dataclass
class Evaluation:
    """The tasks on one model; what `results` holds is not done again."""

    config: ha.ModelConfig
    model: ha.Model
    tokenizer: "Tokenizer"
    settings: EvaluateSettings
    results: Results
    report: Report

    def __post_init__(self) -> None:
        needle, text = self.settings.needle, self.settings.text
        generated = 0
        if self.settings.generate.tokens:
            prompt = self.tokenizer.encode(self.settings.generate.prompt).ids
            generated = len(prompt) + self.settings.generate.tokens
        # One capacity for all tasks, so that they share one compiled step. Rows read
        # up to their own length: capacity costs memory alone.
        self._capacity = self.settings.chunk + max(
            *needle.lengths, text.length if text.windows else 0, generated, 0
        )
        # What the tokenizer puts before every text, such as a first token.
        self._prefix = self.tokenizer.encode("").ids
        self._graph, self._params = nnx.split(self.model)
        self._ids = np.zeros(0, int)
        self._offsets: list[tuple[int, int]] = []
        self._text = ""

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks that are asked for, in their order."""
        asked = {
            "text": self.settings.text.windows,
            "needle": len(self.settings.needle.lengths),
            "generate": self.settings.generate.tokens,
        }
        return [name for name, count in asked.items() if count]

    # -- tasks -------------------------------------------------------------------------

    def text(self) -> None:
        """Nats of every token of the windows."""
        windows, length = self.settings.text.windows, self.settings.text.length
        for number in range(windows):
            name = f"text.{number}"
            if name not in self.results:
                self.results[name] = self._window(number)
            done = self.results[name]
            self.report(
                "text",
                (number + 1) / windows,
                f"window {number + 1} of {windows} ({length} tokens), perplexity "
                f"{math.exp(done['nats'] / done['tokens']):.2f}",
            )

    def needle(self) -> None:
        """Recall of the needles of every haystack."""
        needle, done = self.settings.needle, 0
        total = sum(needle.lengths) * needle.trials
        for length in needle.lengths:
            for trial in range(needle.trials):
                name = f"needle.{length}.{trial}"
                if name not in self.results:
                    share = length / total
                    self.results[name] = self._haystack(
                        length, trial, lambda f, s=share, d=done: self._note(d, s, f)
                    )
                done += length / total
                found = [row["found"] for row in self.results[name]["asked"]]
                self.report(
                    "needle",
                    min(done, 1.0),
                    f"{length} tokens, haystack {trial + 1} of {needle.trials}: "
                    f"{sum(found)} of {len(found)} recalled",
                )

    def generate(self) -> None:
        """The greedy continuation of the prompt."""
        if "generate" not in self.results:
            self.results["generate"] = self._continue()
        self.report("generate", 1.0, f"{self.results['generate']['tokens']} tokens")

    # -- their pieces ------------------------------------------------------------------

    def _note(self, done: float, share: float, fraction: float) -> None:
        self.report("needle", done + share * fraction, "")

    def _cache(self):
        return ha.init_cache(self.config, 1, self._capacity, undo=0)

    def _read(self, cache, tokens: np.ndarray):
        """(nats of tokens 1.., first choices for them, cache) of one row."""
        size = self.settings.chunk
        nats, chosen = [], []
        targets = np.append(tokens[1:], 0)
        for first in range(0, len(tokens), size):
            count = min(size, len(tokens) - first)
            pad = (0, size - count)
            part = [np.pad(x[first : first + count], pad) for x in (tokens, targets)]
            a, b, cache = _score(
                self._graph,
                self._params,
                cache,
                *(x[None].astype(np.int32) for x in part),
                np.array([count], np.int32),
            )
            nats.append(np.asarray(a)[:count])
            chosen.append(np.asarray(b)[:count])
        if not nats:
            return np.zeros(0), np.zeros(0, int), cache
        return np.concatenate(nats)[:-1], np.concatenate(chosen)[:-1], cache

    def _window(self, number: int) -> dict[str, Any]:
        text = self.settings.text
        ids, begin = self._held_out(), time.monotonic()
        available = len(ids) - text.length
        if available < 0:
            raise ConfigError(
                f"config.text: the held-out text has {len(ids)} tokens, fewer than a "
                f"window of {text.length}"
            )
        first = number * available // max(1, text.windows - 1)
        # Without a prefix nothing predicts the first token.
        kept = text.length - len(self._prefix)
        tokens = np.concatenate([self._prefix, ids[first : first + kept]]).astype(int)
        nats, _, _ = self._read(self._cache(), tokens)
        seen = first + (0 if self._prefix else 1)
        low, high = self._offsets[seen][0], self._offsets[first + kept - 1][1]
        edges = [0, *(n for n in _EDGES if n < len(nats)), len(nats)]
        pairs = itertools.pairwise(edges)
        return {
            "nats": float(nats.sum(dtype=np.float64)),
            "tokens": len(nats),
            "bytes": len(self._text[low:high].encode()),
            "bins": [[a, b, float(nats[a:b].sum(dtype=np.float64))] for a, b in pairs],
            "seconds": time.monotonic() - begin,
        }

    def _haystack(self, length: int, trial: int, progress) -> dict[str, Any]:
        """One text with the needle at each depth in turn.

        The text before a needle is read once: every depth goes on from a fork of the
        cache at its place.
        """
        needle, begin = self.settings.needle, time.monotonic()
        rng = np.random.default_rng((self.settings.seed, length, trial))
        least = 10 ** (needle.digits - 1)
        question = (
            f"\nThe secret number of the {rng.choice(COLOURS)} {rng.choice(THINGS)} is"
        )
        number = f" {rng.integers(least, 10 * least)}"
        hidden = np.array(self._encode(f"{question}{number}.\n"))
        asked, answer = self._question(question, number)
        ids = self._held_out()
        size = length - len(self._prefix) - len(hidden) - len(asked) - len(answer)
        if len(ids) < size:
            raise ConfigError(
                f"config.text: the held-out text has {len(ids)} tokens, fewer than a "
                f"haystack of {size}"
            )
        start = int(rng.integers(0, len(ids) - size + 1))
        hay = np.concatenate([self._prefix, ids[start : start + size]]).astype(int)
        tail = np.array([*asked, *answer])
        cuts = [len(self._prefix) + round(depth * size) for depth in needle.depths]
        total = max(cuts) + sum(len(hay) - cut for cut in cuts)
        cache, rows, last, done = self._cache(), {}, 0, 0
        for index in np.argsort(cuts, kind="stable"):
            cut = cuts[index]
            cache = self._read(cache, hay[last:cut])[2]
            rest = np.concatenate([hidden, hay[cut:], tail])
            nats, chosen, _ = self._read(ha.transforms.fork(cache), rest)
            done, last = done + cut - last + len(hay) - cut, cut
            progress(done / total)
            n = len(answer)
            rows[index] = {
                "depth": needle.depths[index],
                "found": bool((chosen[-n:] == answer).all()),
                "nats": float(nats[-n:].mean()),
                "answer": self.tokenizer.decode(answer),
                "given": self.tokenizer.decode(chosen[-n:].tolist()),
            }
        asked_for = [rows[index] for index in range(len(cuts))]
        return {"asked": asked_for, "seconds": time.monotonic() - begin}

    def _question(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """The tokens of both, cut where they are the tokens of the hidden sentence."""
        whole, first = self._encode(question + answer), self._encode(question)
        n = len(first)
        while n and whole[:n] != first[:n]:
            n -= 1
        return whole[:n], whole[n:]

    def _continue(self) -> dict[str, Any]:
        generate, begin = self.settings.generate, time.monotonic()
        prompt = self.tokenizer.encode(generate.prompt).ids
        stop = [self.tokenizer.token_to_id(token) for token in generate.stop]
        new, count, _ = ha.generate(
            self.model,
            ha.init_cache(self.config, 1, self._capacity, undo=0),
            np.array([prompt], np.int32),
            generate.tokens,
            stop_ids=tuple(token for token in stop if token is not None),
        )
        ids = np.asarray(new)[0, : int(count[0])].tolist()
        return {
            "text": self.tokenizer.decode(ids),
            "tokens": len(ids),
            "seconds": time.monotonic() - begin,
        }

    # -- text --------------------------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _held_out(self) -> np.ndarray:
        """Token ids of the held-out files, one after the other."""
        if not self._text:
            try:
                data = TextData(self.settings.text.path).heldout_bytes.tobytes()
            except (OSError, ValueError) as error:
                raise ConfigError(f"config.text.path: {error}") from error
            self._text = data.decode("utf-8", "replace").replace("\0", "\n\n")
            encoded = self.tokenizer.encode(self._text, add_special_tokens=False)
            self._ids = np.asarray(encoded.ids)
            self._offsets = encoded.offsets
        return self._ids


_EDGES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
