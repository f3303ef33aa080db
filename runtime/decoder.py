"""The public door to a bundle: prompts in, text and token ids out, as they are committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .engine import load_rounds
from .errors import InvalidRequest
from .executor import EngineOptions
from .generation import Chunk, Generation
from .grammar_compiler import GrammarCompiler
from .latency import LatencyProfile
from .outcome import Outcome
from .planner import AdaptiveDraftLength, FixedDraftLength, FixedTree, Planner
from .request import Prompt, Request
from .round import Rounds
from .sampling import SamplingParams
from .sequence import FinishReason
from .stats import Stats
from .stops import Ends
from .text import Text
from .tree_shape import TreeShape

if TYPE_CHECKING:
    from .bundle import Bundle

UNPROFILED_DRAFT_TOKENS = 4  # drafted per round where the bundle has no latency profile


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished generation; an end token is among the ids, never in the text."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    stats: Stats


class Decoder:
    """Decodes one sequence at a time from a loaded bundle.

    Not for concurrent use: a request that comes while a stream is running, from whichever thread,
    raises InvalidRequest; close the stream, or load another decoder. A stream that was closed, or
    dropped, leaves the decoder as usable as a finished one.

    `stats` are those of the request that began last. `on_round`, where set, is called with each
    round's Outcome.
    """

    def __init__(self, bundle: Bundle, options: EngineOptions | None = None) -> None:
        manifest = bundle.manifest
        self._manifest = manifest
        self._text = Text(
            bundle.tokenizer_path,
            bundle.chat_template,
            manifest.bos_token_id,
            manifest.eos_token_ids,
        )
        self._compiler = GrammarCompiler(
            bundle.tokenizer_path, manifest.target.vocab_size, manifest.eos_token_ids
        )
        self._rounds: Rounds | None = load_rounds(bundle.path, manifest, options or EngineOptions())
        self._profile = LatencyProfile.from_report(bundle.latency) if bundle.latency else None
        self._running = Lock()
        self.stats: Stats | None = None
        self.on_round: Callable[[Outcome], None] | None = None

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        verify: bool = True,
        threads: int | None = None,
        spin: bool = True,
    ) -> Self:
        """Load a bundle directory.

        verify: compare every file's hash with the manifest. threads: None takes the cores this
        process may run on. spin: False where other processes want the same cores (EngineOptions).
        Raises BundleError and EngineError.
        """
        from .bundle import Bundle

        return cls(
            Bundle.load(Path(path), verify=verify), EngineOptions(threads=threads, spin=spin)
        )

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        num_draft_tokens: int | None = None,
        tree: TreeShape | None = None,
    ) -> Iterator[Chunk]:
        """Yield a chunk per round. The request is checked at once, decoded as it is consumed.

        num_draft_tokens: 0 is plain decoding, None chooses each round by the bundle's latency
        profile and the acceptance seen. tree: drafts to verify at once, in place of a chain: a
        StaticTree or a DynamicTree. Raises InvalidRequest and LimitExceeded.
        """
        return self._run(self._admit(prompt, params, num_draft_tokens, tree))

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        num_draft_tokens: int | None = None,
        tree: TreeShape | None = None,
    ) -> Result:
        """The whole answer at once; arguments and errors as in `stream`."""
        request = self._admit(prompt, params, num_draft_tokens, tree)
        chunks = list(self._run(request))
        reason, stats = chunks[-1].finish_reason, self.stats
        if reason is None or stats is None:
            raise RuntimeError("a finished stream has a finish reason and stats")
        return Result(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            finish_reason=reason,
            seed=request.seed,
            stats=stats,
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids that a prompt stands for."""
        return list(self._admit(prompt, None, None).prompt)

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._text.decode(token_ids)

    def close(self) -> None:
        """Release the sessions and the caches; the decoder is of no use afterwards."""
        self._rounds = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, request: Request) -> Iterator[Chunk]:
        rounds = self._open_rounds()
        if not self._running.acquire(blocking=False):
            raise InvalidRequest(
                "this decoder is busy: a stream is running. Expected one at a time; finish or "
                "close it first, or load another decoder."
            )
        try:
            generation = self._generation(request, rounds)
            self.stats = generation.stats
            try:
                while not generation.finished:
                    yield generation.step()
            finally:
                generation.close()
        finally:
            self._running.release()

    def _generation(self, request: Request, rounds: Rounds) -> Generation:
        manifest = self._manifest
        ends = Ends.of(request.params, manifest.eos_token_ids, manifest.limits.max_context)
        planner = self._planner(request, rounds)
        return Generation(request, rounds, planner, ends, self._text, self.on_round)

    def _planner(self, request: Request, rounds: Rounds) -> Planner:
        most, num_draft_tokens = self._manifest.limits.max_draft_tokens, request.num_draft_tokens
        if request.tree is not None:
            return FixedTree(request.tree)
        if num_draft_tokens is not None:
            return FixedDraftLength(num_draft_tokens)
        if self._profile is None or rounds.drafter is None:
            return FixedDraftLength(min(UNPROFILED_DRAFT_TOKENS, most))
        acceptance = rounds.drafter.acceptance(self._profile.acceptance)
        return AdaptiveDraftLength(self._profile, acceptance, most)

    def _open_rounds(self) -> Rounds:
        if self._rounds is None:
            raise InvalidRequest("this decoder is closed. Expected an open one; load it again.")
        return self._rounds

    def _admit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        num_draft_tokens: int | None,
        tree: TreeShape | None = None,
    ) -> Request:
        self._open_rounds()
        return Request.admit(
            prompt,
            params or SamplingParams(),
            num_draft_tokens,
            self._manifest,
            self._text,
            self._compiler,
            tree,
        )
