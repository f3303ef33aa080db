"""Begin and end tokens, from every place where a checkpoint states them.

A model may end with more tokens than any one of its files says, and running on past an end token is
worse than stopping at a spare one: the end tokens are the union of all places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # the tokenizer's own first, none beyond the vocabulary


def merge_special_tokens(places: Iterable[Mapping[str, Any]], vocab_size: int) -> SpecialTokens:
    """Union of `eos_token_id`, first `bos_token_id`, over the places in their order.

    The first end token is the one that chat templates call `eos_token`. A place states an id, a
    list of ids or nothing. An id of `vocab_size` or more can never be drawn and is left out.
    """
    places = list(places)
    eos = dict.fromkeys(token for place in places for token in _ids(place.get("eos_token_id")))
    bos = [token for place in places for token in _ids(place.get("bos_token_id"))]
    return SpecialTokens(
        bos_token_id=next((token for token in bos if token < vocab_size), None),
        eos_token_ids=tuple(token for token in eos if token < vocab_size),
    )


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]
