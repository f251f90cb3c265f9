"""The peer: transformers' eager DeepSeek-V4, timed in its own interpreter.

This file runs inside the PyTorch environment, where neither jax nor this
repository can be imported: it uses the standard library, torch and transformers
only. It reads one JSON object (a path as the only argument, or standard input),
writes progress to standard error and one JSON object to standard output:

    {"model": {...DeepseekV4Config fields...}, "threads": 2, "seed": 0,
     "cases": [{"name": "8k", "context": 8192, "prefill_repeats": 1,
                "chunk": null, "decode_warmup": 3, "decode_steps": 16}],
     "export": "DIR"}

With "export", the weights go to DIR/model and the tokens and last logits of each
context's first prefill, the warm-up's included, to DIR/reference-<context>.safetensors.

A case is one prefill of `context` tokens (a single forward, or forwards of
`chunk` tokens each) followed by decoding one token at a time on that cache. The
tokens depend on the context alone, so that the logits of a chunked case can be
compared with those of an unchunked one.
"""
# torch and transformers live in the peer's environment only.
# pyright: reportMissingImports=false

import gc
import json
import os
import platform
import statistics
import sys
import time

# Tokens of the warm-up prompt, whose logits are compared as well.
SHORT = 256


def log(message):
    """Write one progress line to standard error, so that standard output is JSON."""
    print(f"[torch] {message}", file=sys.stderr, flush=True)


def build(model_fields, seed):
    """Make the model with random float32 weights.

    Args:
        model_fields: keyword arguments of `DeepseekV4Config`.
        seed: torch seed of the weights.

    Returns:
        The model in evaluation mode.
    """
    import torch
    from transformers.models.deepseek_v4 import (
        configuration_deepseek_v4,
        modeling_deepseek_v4,
    )

    torch.manual_seed(seed)
    config = configuration_deepseek_v4.DeepseekV4Config(**model_fields)
    config._attn_implementation = "eager"
    model = modeling_deepseek_v4.DeepseekV4ForCausalLM(config)
    return model.to(torch.float32).eval()


def count_parameters(model):
    """Count parameters: all, used by one token, and without the vocabulary.

    A token uses `num_experts_per_tok` of the routed experts and everything else.
    The embedding table is counted in full, as in the usual statement of sizes,
    although a token reads one row of it; the "without_embeddings" counts leave
    out both the embedding and the output matrix.

    Returns:
        Dict of integers.
    """
    config = model.config
    total = sum(p.numel() for p in model.parameters())
    routed = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    vocabulary = model.model.embed_tokens.weight.numel() + model.lm_head.weight.numel()
    used = routed * config.num_experts_per_tok // config.n_routed_experts
    active = total - routed + used
    return {
        "parameters_total": total,
        "parameters_active": active,
        "parameters_total_without_embeddings": total - vocabulary,
        "parameters_active_without_embeddings": active - vocabulary,
        "parameters_routed_experts": routed,
        "feed_forward_active": used
        + sum(p.numel() for n, p in model.named_parameters() if "shared_experts" in n),
    }


def prefill(model, tokens, chunk):
    """Run the prompt through the model; returns (logits of the last token, cache)."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=model.config)
    logits = None
    for start in range(0, tokens.shape[1], chunk):
        part = tokens[:, start : start + chunk]
        logits = model(
            input_ids=part, cache=cache, use_cache=True, logits_to_keep=1
        ).logits
    return logits, cache


def decode(model, logits, cache, case):
    """Decode greedily; returns (last logits, seconds of every step but warm-ups)."""
    seconds = []
    for step in range(case["decode_warmup"] + case["decode_steps"]):
        start = time.perf_counter()
        token = logits[:, -1].argmax(-1, keepdim=True)
        logits = model(
            input_ids=token, cache=cache, use_cache=True, logits_to_keep=1
        ).logits
        if step >= case["decode_warmup"]:
            seconds.append(time.perf_counter() - start)
    return logits, seconds


def export_model(model, directory):
    """Write the weights in Hugging Face form to `directory`/model."""
    model.save_pretrained(os.path.join(directory, "model"))


def export_reference(tokens, logits, directory):
    """Write what a prefill read and the last logits that it gave."""
    from safetensors.torch import save_file

    path = os.path.join(directory, f"reference-{tokens.shape[1]}.safetensors")
    save_file({"tokens": tokens, "logits": logits[:, -1].contiguous()}, path)


def run_case(model, case, seed, references, export=None):
    """Time one context length.

    Args:
        model: the model.
        case: see the module's docstring.
        seed: seed of the tokens.
        references: dict from context to the first prefill's last logits; filled
            here, and compared with.
        export: directory for `export_reference`, or None.

    Returns:
        Dict with the prefill times, the decode times and the derived figures.
    """
    import torch

    name, context = case["name"], case["context"]
    chunk = case.get("chunk") or context
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.vocab_size
    tokens = torch.randint(0, vocabulary, (1, context), generator=generator)
    prefill_s = []
    logits = cache = None
    for repeat in range(case["prefill_repeats"]):
        # The old cache and its logits go first: at 8k the eager masks and scores
        # need several GiB.
        logits = cache = None
        gc.collect()
        start = time.perf_counter()
        logits, cache = prefill(model, tokens, chunk)
        prefill_s.append(time.perf_counter() - start)
        log(
            f"{name}: prefill {repeat + 1}/{case['prefill_repeats']} of {context}"
            f" tokens (chunks of {chunk}): {prefill_s[-1]:.2f} s"
        )
    assert logits is not None
    if export and context not in references:
        export_reference(tokens, logits, export)
    reference = references.setdefault(context, logits)
    difference = float((logits - reference).abs().max())
    logits, decode_s = decode(model, logits, cache, case)
    # A decoding step is many small operations: a second thread gains little, and
    # where other processes want the cores, waiting for it costs a lot.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logits, one_thread_s = decode(model, logits, cache, case)
    torch.set_num_threads(threads)
    if not torch.isfinite(logits).all():
        raise RuntimeError(f"{name}: the model produced logits that are not finite")
    median_prefill = statistics.median(prefill_s)
    result = {
        "name": name,
        "context": context,
        "chunk": chunk,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "prefill_tokens_per_s": context / median_prefill,
        "decode_ms_per_token": 1e3 * statistics.median(decode_s),
        "one_thread_decode_s": one_thread_s,
        "one_thread_decode_ms_per_token": 1e3 * statistics.median(one_thread_s),
        "largest_logit": float(reference.abs().max()),
        "difference_from_first": difference,
    }
    log(
        f"{name}: decode {result['decode_ms_per_token']:.2f} ms/token, with one thread"
        f" {result['one_thread_decode_ms_per_token']:.2f}"
    )
    return result


def main():
    """Read the request, measure, print the answer."""
    if len(sys.argv) > 1:
        with open(sys.argv[1], encoding="utf-8") as file:
            request = json.load(file)
    else:
        request = json.load(sys.stdin)
    # Set before torch is loaded: its thread pools read it once.
    threads = request.get("threads") or os.cpu_count()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    log("loading torch and transformers")
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = build(request["model"], request.get("seed", 0))
    counts = count_parameters(model)
    log(
        f"model: {counts['parameters_total'] / 1e6:.2f}M parameters,"
        f" {counts['parameters_active'] / 1e6:.2f}M active"
    )
    with torch.inference_mode():
        # Allocator, thread pool and kernel selection warm up on a short prompt.
        log("warm-up")
        export = request.get("export")
        if export:
            export_model(model, export)
        run_case(
            model,
            {
                "name": "warm-up",
                "context": SHORT,
                "prefill_repeats": 1,
                "decode_warmup": 0,
                "decode_steps": 2,
            },
            seed=1,
            references={},
            export=export,
        )
        references = {}
        cases = [
            run_case(model, case, 2, references, export) for case in request["cases"]
        ]
    result = {
        "cases": cases,
        "parameters": counts,
        "attention": model.config._attn_implementation,
        "experts": model.config._experts_implementation,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    json.dump(result, sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
