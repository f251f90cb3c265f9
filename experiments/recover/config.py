"""What `experiments.recover` is asked to measure."""

import dataclasses
from typing import Literal

TASKS = (
    "flips",
    "control",
    "resident",
    "storm",
    "graph",
    "throughput",
    "crash",
)


@dataclasses.dataclass(frozen=True)
class Flips:
    """Single-bit flips in the files of a store.

    Attributes:
      count: how many; 0 skips the campaign.
      piece: of a piece, which a resumed run does not repeat; each has its own store.
      rows: prompts, each with blocks of its own; one flip a row is made at a time.
      blocks: full blocks of a prompt.
      index_share: the least share of flips that hit anything but blocks, which have
        most of the bytes.
    """

    count: int = 10_000
    piece: int = 2_500
    rows: int = 32
    blocks: int = 3
    index_share: float = 0.05

    def __post_init__(self):
        if self.count < 0 or min(self.piece, self.rows, self.blocks) < 1:
            raise ValueError(f"{self}: expected counts from 0, and sizes from 1")
        if not 0 <= self.index_share <= 1:
            raise ValueError(f"index_share={self.index_share}: expected 0..1")


@dataclasses.dataclass(frozen=True)
class Control:
    """Reuse of entries alone. ``prompts`` are run; a logit that differs by more than
    ``tolerance`` is wrong.
    """

    prompts: int = 16
    tolerance: float = 1e-3


@dataclasses.dataclass(frozen=True)
class Resident:
    """Flips in copies of sealed blocks that lie in memory.

    Attributes:
      flips: half of them in host copies, half in device copies.
      sample: blocks that the scrubber checks after each decoding step.
      steps: timed, with and without scrubbing in turn.
      context: tokens before the first timed step.
    """

    flips: int = 1_000
    sample: int = 1
    steps: int = 200
    context: int = 2_048

    def __post_init__(self):
        if min(self.flips, self.sample, self.steps, self.context) < 1:
            raise ValueError(f"{self}: expected numbers from 1")


@dataclasses.dataclass(frozen=True)
class Storm:
    """Decoding while blocks are rebuilt.

    Attributes:
      rebuilds: blocks of a storm.
      storms: how often.
      window: blocks of a storm after which as many idle steps follow; 0 for all.
      rows, context: sequences that decode, and their tokens before the first step.
      slow_ms: added to every read of the second copy.
      per_second: blocks that are given to the rebuilder, 0 for all at once.
      fetchers: threads of the pipeline's first stage, which waits most.
      read_every: decoding steps between two reads of a block.
      room: steps after which the sequences begin anew.
    """

    rebuilds: int = 100
    storms: int = 3
    window: int = 20
    rows: int = 4
    context: int = 2_368
    slow_ms: float = 20.0
    per_second: float = 25.0
    fetchers: int = 4
    read_every: int = 4
    room: int = 2_048

    def __post_init__(self):
        counts = (self.rebuilds, self.storms, self.rows, self.context, self.fetchers)
        if (
            min(*counts, self.read_every, self.room) < 1
            or min(self.slow_ms, self.per_second, self.window) < 0
        ):
            raise ValueError(f"{self}: expected numbers from 1 and a delay from 0")


@dataclasses.dataclass(frozen=True)
class Graph:
    """Random events on the graph of cache groups."""

    events: int = 10_000
    piece: int = 2_000


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Offload and restore of a long prefix. ``repeats`` pairs with and without CRC."""

    tokens: int = 16_384
    repeats: int = 5


@dataclasses.dataclass(frozen=True)
class Crash:
    """A killed process that decodes many sequences under checkpoints.

    Attributes:
      rows, context, tokens: sequences, and what each reads and decodes.
      kills: how many processes are killed at a random moment.
      long: the prompt whose recovery is timed against recomputing it.
      snapshot_tokens: between two snapshots.
      catch_up: tokens in the log that a recovery reads; catch_up_step: of a record.
      log_context: at which the bytes of an increment are compared with a snapshot.
      intervals: tokens between two records of the log, from 1, for the table of tokens
        at risk; overhead_steps: timed for each.
    """

    rows: int = 4
    context: int = 256
    tokens: int = 256
    kills: int = 3
    long: int = 16_384
    snapshot_tokens: int = 64
    catch_up: tuple[int, ...] = (64, 1_024, 16_384)
    catch_up_step: int = 16
    log_context: int = 65_536
    intervals: tuple[int, ...] = (1, 8, 64)
    overhead_steps: int = 160

    def __post_init__(self):
        if 1 not in self.intervals or not self.catch_up:
            raise ValueError(
                f"intervals={self.intervals}, catch_up={self.catch_up}: expected 1 "
                "among the intervals, and some logs"
            )
        if min(self.rows, self.context, self.kills, self.tokens // 2) < 1:
            raise ValueError(f"{self}: expected numbers from 1, and two tokens")


@dataclasses.dataclass(frozen=True)
class Config:
    """The parts of the program; ``tasks`` are run, in the order of `TASKS`.

    ``model`` is what times are measured on: 12.8 million parameters with experts and
    hyper-connections, or a few thousand numbers for tests. Flips, control and graph
    always take a small one: nothing about them depends on its size.
    """

    tasks: tuple[str, ...] = TASKS
    model: Literal["peers_v4_experts", "tiny"] = "peers_v4_experts"
    seed: int = 0
    flips: Flips = dataclasses.field(default_factory=Flips)
    control: Control = dataclasses.field(default_factory=Control)
    resident: Resident = dataclasses.field(default_factory=Resident)
    storm: Storm = dataclasses.field(default_factory=Storm)
    graph: Graph = dataclasses.field(default_factory=Graph)
    throughput: Throughput = dataclasses.field(default_factory=Throughput)
    crash: Crash = dataclasses.field(default_factory=Crash)

    def __post_init__(self):
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown or not self.tasks:
            raise ValueError(f"tasks={self.tasks}: expected some of {', '.join(TASKS)}")
