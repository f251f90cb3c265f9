"""What `bench_kernels` is asked to measure."""

import dataclasses
from typing import Literal

OPS = (
    "window_attention",
    "compressed_attention",
    "sparse_attention",
    "indexer_topk",
    "pool",
    "kv_quant",
    "morton",
    "codec_transform",
    "alignment",
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The benchmark.

    Attributes:
      ops: which of `OPS`, in that order.
      profile: the shapes: "cpu" (float32, small), "gpu" (bfloat16, of DeepSeek-V4
        Flash), "tiny" for tests; "auto" goes by JAX's default device.
      seconds: spent on each contender of a case that asks for no more; one call at
        least, and two, are always timed.
      tune: on a GPU, try configurations of the kernels first.
      tune_seconds: for each case; configurations that are left then are not tried.
      tables: directory of the tuned tables that are read and written; empty for the
        one that kernels read, `pallas_kernels/tuned`.
      seed: of the arrays.
    """

    ops: tuple[str, ...] = OPS
    profile: Literal["auto", "cpu", "gpu", "tiny"] = "auto"
    seconds: float = 0.5
    tune: bool = True
    tune_seconds: float = 15.0
    tables: str = ""
    seed: int = 0

    def __post_init__(self):
        unknown = [op for op in self.ops if op not in OPS]
        if unknown or not self.ops:
            raise ValueError(f"ops={self.ops}: expected some of {', '.join(OPS)}")
        for name in ("seconds", "tune_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected above 0")
