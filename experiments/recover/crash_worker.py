"""The process that is killed: it decodes sequences greedily and records every step.

Reads one line of JSON (directory, model, sizes) from standard input and writes lines
of JSON: "restored" where there was a checkpoint, "made" when a step's tokens are
known and "ack" once they are durable.
"""

import json
import sys
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import hybrid_attn as ha
from experiments.recover.subject import subject
from hybrid_attn import checkpoint

CACHE = "rows"


def decode(request: dict, say: Callable[..., None]) -> None:
    """Decodes what the request asks for, going on from its checkpoint if there is one.

    Args:
      request: path, model, seed, rows, context, tokens, every_tokens.
      say: is called with the keys of each line.
    """
    own = subject(request["model"], request["seed"])
    prompts = own.prompts(request["rows"], request["context"], request["seed"])
    context, total = request["context"], request["tokens"]
    with checkpoint.Checkpointer(
        request["path"],
        model_id=own.identity,
        every_tokens=request["every_tokens"],
        log_tokens=1,
    ) as keeper:
        if checkpoint.latest(request["path"]) is not None:
            restored = keeper.restore(own.config)
            cache, held = restored.caches[CACHE], restored.tokens[CACHE]
            say(
                event="restored",
                tokens=[row[context:].tolist() for row in held],
                lost=restored.report.lost,
                refused=list(restored.report.refused),
            )
        else:
            cache = ha.init_cache(
                own.config, len(prompts), context + total + own.block_tokens
            )
            logits, cache = ha.prefill(own.model, cache, prompts, logits="last")
            held = _extended(list(prompts), logits)
            keeper.observe({CACHE: cache}, {CACHE: held})
            say(event="ack", tokens=[int(row[-1]) for row in held])
        run = ha.compile_step(own.model, logits="last")
        while (made := held[0].size - context) < total:
            pending = np.array([row[-1:] for row in held], np.int32)
            logits, cache = run(cache, pending)
            held = _extended(held, logits)
            new = [int(row[-1]) for row in held]
            say(event="made", number=made + 1, tokens=new)
            keeper.observe({CACHE: cache}, {CACHE: held})
            say(event="ack", tokens=new)
    say(event="end")


def main() -> None:
    """Serves a `crash.Decoder` until all tokens are made, or until it is killed."""

    def say(**line) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    decode(json.loads(sys.stdin.readline()), say)


def _extended(held: list[np.ndarray], logits) -> list[np.ndarray]:
    new = np.asarray(jnp.argmax(logits, axis=-1), np.int32)
    return [np.append(row, token) for row, token in zip(held, new, strict=True)]


if __name__ == "__main__":
    main()
