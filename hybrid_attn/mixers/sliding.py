"""`swa`: a sliding window with optional time decay."""

from hybrid_attn.mixers.base import Mixer
from hybrid_attn.mixers.registry import register_mixer


@register_mixer("swa")
class SlidingMixer(Mixer):
    """Reads the last ``window`` positions, itself included.

    A per-head penalty λ·distance (nats) may fall on the logits; λ is fixed or learned
    and may be zero, as in ALiBi (arXiv 2108.12409).
    """

    kind = "swa"

    def attend(self, inputs, states, span, *, dense):
        partial, new = self.window_partial(inputs, states, span)
        return partial, new, {}
