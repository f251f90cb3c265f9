"""What `experiments.peers` is asked to measure."""

import dataclasses

import hybrid_attn as ha
from experiments.peers import sizes
from experiments.peers.growth import Growth


@dataclasses.dataclass(frozen=True)
class Repeats:
    """How often one side repeats what it times; steps are decoded tokens."""

    prefill: int = 3
    # Prefills of the longest context; the peer needs about a minute for one.
    prefill_longest: int = 3
    decode_warmup: int = 8
    decode_steps: int = 64
    # Calls of `ha.generate`, and the tokens of each; only ours.
    generate: int = 9
    generate_tokens: int = 256

    def __post_init__(self):
        counts = (self.prefill, self.prefill_longest, self.decode_steps)
        if min(*counts, self.generate, self.generate_tokens) < 1:
            raise ValueError(f"{self}: expected at least one of each")


@dataclasses.dataclass(frozen=True)
class Config:
    """The model, the contexts (in tokens, ascending) and the repeats of each side.

    `chunk` is the piece length of the peer's additional, chunked prefill at the
    longest context; `hyper_connection_control` repeats the peer with one residual
    stream, for our model has no hyper-connections; `growth` is how our decoding slows
    down up to longer contexts (`--config.growth.contexts='()'` leaves it out).
    """

    preset: str = "peers_v4"
    vocabulary: int = sizes.VOCABULARY
    contexts: tuple[int, ...] = (1024, 8192)
    chunk: int = 512
    experts: sizes.Experts = dataclasses.field(default_factory=sizes.Experts)
    transformers: Repeats = dataclasses.field(
        default_factory=lambda: Repeats(3, 1, 3, 32)
    )
    hybrid_attn: Repeats = dataclasses.field(default_factory=Repeats)
    hyper_connection_control: bool = True
    growth: Growth = dataclasses.field(default_factory=Growth)

    def __post_init__(self):
        if not self.contexts or list(self.contexts) != sorted(set(self.contexts)):
            raise ValueError(f"contexts={self.contexts}: expected ascending lengths")
        if self.contexts[0] < 1 or self.chunk < 1:
            raise ValueError(
                f"contexts={self.contexts}, chunk={self.chunk}: expected at least 1"
            )
        sizes.check_equal_active(self.model(), self.experts)

    def model(self) -> ha.ModelConfig:
        """Our model's configuration, from which the peer's is derived."""
        return ha.presets.get(self.preset).replace(vocab_size=self.vocabulary)

    def cases(self, repeats: Repeats) -> list[dict]:
        """One case for each context, in the form that both sides take."""
        return [
            {
                "name": label(context),
                "context": context,
                "prefill_repeats": repeats.prefill_longest
                if context == self.contexts[-1]
                else repeats.prefill,
                "decode_warmup": repeats.decode_warmup,
                "decode_steps": repeats.decode_steps,
                "generate_repeats": repeats.generate,
                "generate_tokens": repeats.generate_tokens,
            }
            for context in self.contexts
        ]

    def chunked_case(self) -> dict:
        """The peer's additional case: the longest context in pieces of `chunk`."""
        case = self.cases(self.transformers)[-1]
        return {**case, "name": f"{case['name']}_chunked", "chunk": self.chunk}


def label(context: int) -> str:
    """A context length as the keys name it: 8192 is "8k", 100 is "100"."""
    return f"{context // 1024}k" if context % 1024 == 0 else str(context)
