"""What a request may ask its text to be: a JSON schema, a regular expression or a Lark grammar.

A value only, checked for what can be told without the grammar library; `GrammarCompiler` makes a
matcher of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from .errors import InvalidRequest


class GrammarKind(StrEnum):
    """The languages that a grammar may be written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The whole generated text obeys it, from its first token to its last.

    Raises InvalidRequest naming `grammar`. Whether it compiles, only the compiler can tell.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", _kind(self.kind))
        _check_text(self.text)
        if self.kind is GrammarKind.JSON_SCHEMA:
            _check_json(self.text)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Self:
        """A JSON schema, as a mapping or as JSON text.

        White space is free between the parts; `"x-guidance": {"whitespace_flexible": false}` in the
        schema allows none, for a model that would go on with it for ever.
        """
        if isinstance(schema, Mapping):
            return cls(kind=GrammarKind.JSON_SCHEMA, text=_as_json(schema))
        return cls(kind=GrammarKind.JSON_SCHEMA, text=schema)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """A regular expression in Rust's syntax, that the whole text matches: no look-around."""
        return cls(kind=GrammarKind.REGEX, text=pattern)

    @classmethod
    def lark(cls, text: str) -> Self:
        """A context-free grammar in llguidance's Lark (an EBNF), beginning at the rule `start`.

        It doesn't name the model's end tokens: they are allowed wherever the grammar may end.
        """
        return cls(kind=GrammarKind.LARK, text=text)


def _kind(received: object) -> GrammarKind:
    try:
        return GrammarKind(received)  # type: ignore[arg-type]  # anything else is refused here
    except ValueError:
        kinds = ", ".join(GrammarKind)
        raise InvalidRequest(
            f"grammar: received the kind {received!r}. Expected one of {kinds}."
        ) from None


def _check_text(text: object) -> None:
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"grammar: received {text!r}. Expected a text that is not empty.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"grammar: received half a character at {error.start}. Expected text that UTF-8 can "
            "hold; join the surrogates."
        ) from None


def _as_json(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"grammar: received a schema that is not JSON: {error}. Expected mappings, lists, "
            "strings, finite numbers, booleans and None."
        ) from None


def _check_json(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"grammar: received a schema that is not JSON: {error}. Expected a JSON object."
        ) from None
    if not isinstance(schema, dict):
        kind = type(schema).__name__
        raise InvalidRequest(f"grammar: received a JSON {kind}. Expected a JSON object.")
