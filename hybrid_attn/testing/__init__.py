"""The invariants of hybrid_attn, for its own mixers and for yours.

from hybrid_attn.testing import conformance
for result in conformance("my_kind"):
    print(result)
"""

from hybrid_attn.testing.conformance import INVARIANTS, check_invariant, conformance
from hybrid_attn.testing.report import Checks, Result
from hybrid_attn.testing.subject import Subject, as_config, small_config
from hybrid_attn.testing.tolerances import TOLERANCES, Tolerance, tolerance

__all__ = [
    "INVARIANTS",
    "TOLERANCES",
    "Checks",
    "Result",
    "Subject",
    "Tolerance",
    "as_config",
    "check_invariant",
    "conformance",
    "small_config",
    "tolerance",
]
