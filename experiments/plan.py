"""What a model weighs, computes and caches at a context, on a number of devices.

    python -m experiments.plan --model=deepseek_v4_pro --context=1048576 --devices=32
        --workdir=DIR [--config=configs/plan.py] [--config.rows=64 ...]

Counts abstract shapes, so it takes seconds and no memory for a model of any size.
--model, --context and --devices are short for --config.model and so on.

summary.json, for each model M (`pro`, `flash`, else the preset's name) and its dense
twin (`M_dense`: grouped-query attention, 8 key/value heads of 128, see
`plan_count.dense_twin`):

    context, devices, rows              as asked
    M.parameters, M.active_parameters   all; multiplied for one token
    M.parameters_with_draft             with `draft_layers` draft layers (V4 presets)
    M.flops_per_token, M.flops_per_token.PART    decoding one at the context; PART is
                                        projections, experts, indexer, attention, head
    M.cache_bytes_per_token_bf16        entries and index keys: what grows
    M.cache_bytes_per_token_records     the same in fp8 and fp4 records
    M.cache_gib_at_context_bf16, M.cache_gib_at_context_records    times the context
    M.cache_fixed_mib                   windows and raw rows of compressors, a row
    M.cache_total_gib_at_context_bf16   all arrays of one row's cache, as allocated
    M.device_weight_gib, M.device_cache_gib    of the fullest device, bf16 cache
    M.device_rows_that_fit              rows that `device_gib` leaves room for
    M.cache_ratio_to_dense              M / M_dense of cache_bytes_per_token_bf16
    M.cache_ratio_to_dense_records      records of M / bf16 of M_dense
    M.flops_ratio_to_dense              M / M_dense of flops_per_token

The twin has no key of records, drafts or ratios.
"""

import re
import sys
import time
from typing import Any

import hybrid_attn as ha
from experiments import plan_count, runner
from experiments.plan_config import PlanConfig, short_name
from experiments.plan_report import STAGE, table_rows, write_report

_SHORT = re.compile(r"--?(model|context|devices)(?==|$)")


def main(config: PlanConfig, workdir: runner.Workdir) -> None:
    """Counts every model, then writes the summary, the report and the figure."""
    begin = time.monotonic()
    models: dict[str, dict[str, Any]] = {}
    with runner.Progress(dict.fromkeys(config.names, 5.0)) as progress:
        for name in config.names:
            progress.start(name)
            model = ha.presets.get(name)
            twin = plan_count.dense_twin(model)
            short = short_name(name)
            models[short] = count(model, config)
            progress.update(0.5, "its dense twin")
            models[f"{short}_dense"] = count(twin, config, twin=True)
            progress.finish()
    asked = {"context": config.context, "devices": config.devices, "rows": config.rows}
    workdir.mark_done(STAGE, {**asked, "models": models})
    report = write_report(workdir.path)
    seconds = time.monotonic() - begin
    workdir.write_summary({**asked, **summary(models), "total_seconds": seconds})
    columns, rows = table_rows(models)
    runner.print_table(f"At {config.context:,} tokens", columns, rows)
    print(f"{seconds:.1f} s. Report: {report}")


def count(
    model: ha.ModelConfig, config: PlanConfig, *, twin: bool = False
) -> dict[str, Any]:
    """The figures of one model: those of the summary, cache lines, and curves."""
    weights = plan_count.weights(model)
    lines = plan_count.cache_lines(model, config.context)
    capacity = plan_count.capacity(model, config.context)
    growing = sum(line.bytes for line in lines if line.per_token)
    whole = sum(line.bytes for line in lines)
    per_token = growing / capacity
    flops = plan_count.flops(model, config.context)
    held, cached, row = plan_count.device_bytes(
        model,
        lines,
        devices=config.devices,
        rows=config.rows,
        sharding=config.sharding,
        weight_bits=config.weight_bits,
        expert_bits=config.expert_bits,
    )
    figures: dict[str, Any] = {
        "parameters": weights.total,
        "active_parameters": weights.active,
        "flops_per_token": sum(flops.values()),
        **{f"flops_per_token.{part}": value for part, value in flops.items()},
        "cache_bytes_per_token_bf16": per_token,
        "cache_gib_at_context_bf16": per_token * config.context / 2**30,
        "cache_fixed_mib": (whole - growing) / 2**20,
        "cache_total_gib_at_context_bf16": whole / 2**30,
        "device_weight_gib": held / 2**30,
        "device_cache_gib": cached / 2**30,
        "device_rows_that_fit": max(0, int((config.device_gib * 2**30 - held) // row)),
    }
    if not twin:
        records = plan_count.record_bytes_per_token(model)
        figures["cache_bytes_per_token_records"] = records
        figures["cache_gib_at_context_records"] = records * config.context / 2**30
    if model.name.startswith("deepseek_v4") and not twin:
        drafting = plan_count.draft_parameters(model, config.draft_layers)
        figures["parameters_with_draft"] = weights.total + drafting
    contexts = [1 << n for n in range(10, max(11, config.context.bit_length()))]
    return {
        "name": model.name,
        "layers": model.pattern,
        "heads": [model.layers[0].heads, model.layers[0].head_dim],
        "figures": figures,
        "cache": [vars(line) for line in lines],
        "curve": {
            "context": contexts,
            "cache_bytes": [per_token * n + whole - growing for n in contexts],
            "flops": [sum(plan_count.flops(model, n).values()) for n in contexts],
        },
    }


def summary(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The flat keys; adds the ratios of each model to its twin."""
    keys: dict[str, Any] = {}
    for name, model in models.items():
        own = dict(model["figures"])
        if f"{name}_dense" in models:
            dense = models[f"{name}_dense"]["figures"]
            cache = dense["cache_bytes_per_token_bf16"]
            own["cache_ratio_to_dense"] = own["cache_bytes_per_token_bf16"] / cache
            own["cache_ratio_to_dense_records"] = (
                own["cache_bytes_per_token_records"] / cache
            )
            own["flops_ratio_to_dense"] = (
                own["flops_per_token"] / dense["flops_per_token"]
            )
        keys |= {f"{name}.{key}": value for key, value in own.items()}
    return keys


def long_flags(arguments: list[str]) -> list[str]:
    """--model, --context and --devices as the flags of the config that they mean."""
    return [_SHORT.sub(r"--config.\1", argument) for argument in arguments]


if __name__ == "__main__":
    sys.argv[1:] = long_flags(sys.argv[1:])
    runner.define_flags("configs/plan.py")
    runner.run("plan", PlanConfig, main)
