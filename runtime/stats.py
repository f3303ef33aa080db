"""What a request did and what it took, under the names that users of this field know.

Every rate stands beside its denominator. Seconds are the decoder's own: time that the consumer
of a stream takes between chunks is nobody's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .outcome import Outcome


@dataclass(kw_only=True)
class Stats:
    """Counters of one request; `as_dict` adds what follows from them.

    Acceptance counts the decisions of all rounds, also of drafts that an end token or a limit
    then cut off; committed (output) tokens count only what is left after the cut.
    """

    seed: int
    max_draft_tokens: int
    max_context: int
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_decode_tokens: int = 0  # committed by rounds: all output tokens but the first
    num_spec_steps: int = 0  # rounds with k ≥ 1
    num_plain_steps: int = 0  # rounds with k = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0  # draft_s + verify_s + accept_s + compact_s + overhead_s
    draft_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    compact_s: float = 0.0  # of trees, to move the accepted path's rows into place
    target_rows: int = 0
    draft_rows: int = 0
    finish_reason: str | None = None
    acceptance_histogram: list[int] = field(default_factory=list)  # rounds by accepted drafts
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    itl: list[float] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.acceptance_histogram = [0] * (self.max_draft_tokens + 1)
        self.drafted_per_position = [0] * self.max_draft_tokens
        self.accepted_per_position = [0] * self.max_draft_tokens

    def prefilled(self, num_committed: int, seconds: float) -> None:
        """The prompt was read and its first token drawn."""
        self.num_output_tokens += num_committed
        self.ttft_s = seconds

    def decoded(self, outcome: Outcome, num_committed: int, seconds: float) -> None:
        """One round; its seconds are shared evenly among the tokens it committed."""
        self.num_output_tokens += num_committed
        self.num_decode_tokens += num_committed
        self.decode_s += seconds
        self.draft_s += outcome.draft_s
        self.verify_s += outcome.verify_s
        self.accept_s += outcome.accept_s
        self.compact_s += outcome.compact_s
        self.itl += [seconds / num_committed] * num_committed
        nodes = outcome.num_drafted if outcome.num_nodes is None else outcome.num_nodes
        self._count(outcome.num_drafted, outcome.num_accepted, nodes)

    def _count(self, drafted: int, accepted: int, nodes: int) -> None:
        if not drafted:
            self.num_plain_steps += 1
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += nodes
        self.num_accepted_draft_tokens += accepted
        self.acceptance_histogram[accepted] += 1
        for i in range(drafted):
            self.drafted_per_position[i] += 1
            self.accepted_per_position[i] += i < accepted

    @property
    def overhead_s(self) -> float:
        """Decode time outside the engine calls."""
        return self.decode_s - self.draft_s - self.verify_s - self.accept_s - self.compact_s

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens / drafted tokens; None where nothing was drafted."""
        return _ratio(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per speculative verify call: 1 + accepted / num_spec_steps."""
        rate = _ratio(self.num_accepted_draft_tokens, self.num_spec_steps)
        return None if rate is None else 1 + rate

    @property
    def output_tokens_per_s(self) -> float | None:
        """Output tokens over the whole request, reading the prompt included."""
        return _ratio(self.num_output_tokens, self.ttft_s + self.decode_s)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Output tokens behind the first over the decode time."""
        return _ratio(self.num_decode_tokens, self.decode_s)

    @property
    def itl_s(self) -> dict[str, float | None]:
        """Inter-token latency: percentiles over the tokens behind the first."""
        import numpy as np

        if not self.itl:
            return {"p50": None, "p90": None, "p99": None}
        values = np.percentile(self.itl, (50, 90, 99))
        return dict(zip(("p50", "p90", "p99"), map(float, values), strict=True))

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        steps = self.num_spec_steps + self.num_plain_steps
        counters = {k: v for k, v in vars(self).items() if k not in ("itl", "max_context")}
        return counters | {
            "overhead_s": self.overhead_s,
            "itl_s": self.itl_s,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "output_tokens_per_s": self.output_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "draft_tokens_per_committed_token": _ratio(
                self.num_draft_tokens, self.num_decode_tokens
            ),
            "target_calls_per_committed_token": _ratio(steps, self.num_decode_tokens),
            "target_kv_occupancy": self.target_rows / self.max_context,
            "draft_kv_occupancy": self.draft_rows / self.max_context,
        }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
