"""What `plan` is asked to count; checked before anything is counted."""

import dataclasses
import difflib
from typing import Literal

import hybrid_attn as ha
from experiments.runner import ConfigError

Sharding = Literal["replicated", "experts", "experts_heads"]

SHARDINGS: dict[str, str] = {
    "replicated": "every device holds all weights and its share of the rows",
    "experts": "routed experts are divided over the devices; each device holds all "
    "other weights and the cache of its share of the rows",
    "experts_heads": "routed experts are divided over the devices, and so are query "
    "and output weights by head, embedding and head by vocabulary; every device "
    "serves all rows and caches its share of the key/value heads (at least one), "
    "index keys and raw rows of compressors in full",
}
"""What each sharding divides; what does not divide evenly is rounded up."""


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """The plan.

    Attributes:
      model: a preset's name.
      beside: presets that are counted too.
      context: tokens that a row holds.
      devices: how many share weights and rows.
      rows: sequences that are held at once, over all devices.
      sharding: what is divided over the devices, one of `SHARDINGS`.
      weight_bits, expert_bits: bits of a weight, and of one of the routed experts.
      device_gib: memory of a device, for the rows that fit.
      draft_layers: window-only layers that the published models add for drafting.

    Raises:
      ConfigError: an unknown model, naming the nearest, or a number below 1.
    """

    model: str = "deepseek_v4_pro"
    beside: tuple[str, ...] = ("deepseek_v4_pro", "deepseek_v4_flash")
    context: int = 1 << 20
    devices: int = 32
    rows: int = 32
    sharding: Sharding = "experts"
    weight_bits: int = 16
    expert_bits: int = 16
    device_gib: float = 141.0
    draft_layers: int = 1

    def __post_init__(self) -> None:
        for field in (
            "context devices rows weight_bits expert_bits device_gib draft_layers"
        ).split():
            value = getattr(self, field)
            if value < 1:
                raise ConfigError(f"config.{field}={value}: expected 1 or more")
        for name in self.names:
            if name not in ha.presets.names():
                where = "model" if name == self.model else "beside"
                raise ConfigError(_unknown(where, name))

    @property
    def names(self) -> tuple[str, ...]:
        """The models that are counted, the one that is asked for first."""
        return tuple(dict.fromkeys((self.model, *self.beside)))


def short_name(model: str) -> str:
    """The prefix of a model's keys in summary.json: pro, flash, or its own name."""
    return model.removeprefix("deepseek_v4_")


def _unknown(where: str, name: str) -> str:
    known = ha.presets.names()
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return (
        f"config.{where}: unknown preset {name!r}, expected one of "
        f"{', '.join(known)}{hint}"
    )
