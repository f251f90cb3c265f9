"""AdamW with warm-up, cosine decay and gradient clipping."""

import dataclasses

import jax
import optax


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101); ``warmup`` and ``steps`` count updates."""

    peak_rate: float = 4e-3
    end_fraction: float = 0.05
    warmup: int = 40
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float = 1.0

    def __post_init__(self):
        if self.peak_rate <= 0 or self.clip <= 0 or self.warmup < 0:
            raise ValueError(
                f"peak_rate={self.peak_rate}, clip={self.clip}, warmup={self.warmup}: "
                "expected above 0, above 0 and at least 0"
            )


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by update: linear warm-up, then a cosine to its end."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.peak_rate,
        warmup_steps=min(config.warmup, max(steps - 1, 0)),
        decay_steps=steps,
        end_value=config.peak_rate * config.end_fraction,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW; matrices alone decay."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
    )
