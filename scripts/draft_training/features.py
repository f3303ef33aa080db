"""The states of the target which a feature drafter reads, stored beside the labels.

A file holds, for every token of its chunk in the order of the labels, the inputs of three layers
(EAGLE-3's low, mid and high tap) and the state behind the final norm. They're kept in f16: the
runtime's target computes in less precision than that.

Invariant: like the labels, a file is complete or absent, and ``plan.json`` guards what it depends
on.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from .errors import TargetError
from .labels import BATCH_TOKENS, wait_for, write_atomic
from .text import Conversation, length_batches, pad

FEWEST_LAYERS = 7  # below that the taps fall together
TAPS = 3  # of the features; the last state behind them is Medusa's


def taps(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs EAGLE-3 reads, as hidden_states counts them.

    Raises:
        TargetError: the target has too few layers to tell the taps apart.
    """
    if layers < FEWEST_LAYERS:
        raise TargetError(
            f"--target: received {layers} layers. Expected at least {FEWEST_LAYERS}: the features "
            "are the inputs of layers 2, N//2 and N-3; train another --kind for this target."
        )
    return 2, layers // 2, layers - 3


def feature_path(work: Path, index: int) -> Path:
    return work / f"features-{index:05d}.npy"


def held_out_path(work: Path) -> Path:
    return work / "features-held-out.npy"


@torch.inference_mode()
def features(target: PreTrainedModel, rows: Sequence[Conversation]) -> np.ndarray:
    """Run the target over ``rows``. # [tokens, TAPS + 1, H] f16"""
    lengths = [len(row) for row in rows]
    out: list[np.ndarray] = [np.empty(0)] * len(rows)
    for batch in length_batches(lengths, BATCH_TOKENS):
        tokens = torch.from_numpy(pad([rows[i].ids for i in batch]))
        states = _states(target, tokens).numpy().astype(np.float16)
        for state, index in zip(states, batch, strict=True):
            out[index] = state[: lengths[index]]
    return np.concatenate(out)


def _states(target: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """The taps and the last normed state. # [batch, length, TAPS + 1, H] f32"""
    result = target.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    hidden = result.hidden_states
    tapped = [hidden[i] for i in taps(target.config.num_hidden_layers)]
    return torch.stack([*tapped, result.last_hidden_state], 2)


def store_features(
    target: PreTrainedModel,
    chunks: Sequence[Sequence[Conversation]],
    held_out: Sequence[Conversation],
    *,
    work: Path,
    progress: Callable[[int, int], None],
) -> None:
    """Store what is still missing, in the order in which a first epoch asks for it."""
    for done, (path, rows) in enumerate(_plan(work, chunks, held_out)):
        progress(done, len(chunks) + 1)
        if not path.exists():
            states = features(target, rows)
            write_atomic(path, lambda p, a=states: _save(p, a))
    progress(len(chunks) + 1, len(chunks) + 1)


def _plan(
    work: Path, chunks: Sequence[Sequence[Conversation]], held_out: Sequence[Conversation]
) -> Iterator[tuple[Path, Sequence[Conversation]]]:
    yield held_out_path(work), held_out
    for index, rows in enumerate(chunks):
        yield feature_path(work, index), rows


def _save(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as stream:  # np.save would add a suffix to the name
        np.save(stream, array)


def wait_for_features(work: Path, index: int) -> np.ndarray:
    """Load a chunk's features, waiting for another process which still makes them."""
    return np.load(wait_for(feature_path(work, index)))


def load_held_out_features(work: Path) -> np.ndarray:
    return np.load(held_out_path(work))
