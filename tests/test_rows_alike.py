"""An int8 target gives a row the same bits alone and among others, so greedy text is one text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from helpers_build import POSITIONS, build_bundle

from engines.onnxruntime.rows_alike import RowsAlikePass
from export.build import BuildRequest, build
from export.gate_graph import GateGraph
from runtime import Decoder, SamplingParams
from runtime.bundle import Bundle
from runtime.errors import LimitExceeded

TEXT = np.random.default_rng(0).integers(3, 250, POSITIONS).tolist()


@pytest.fixture(scope="module")
def int8_bundle(kept_traces: None, build_root: Path, tiny_target: Path, tiny_draft: Path) -> Path:
    return build_bundle(build_root / "rows-alike", tiny_target, tiny_draft, "int8")


@pytest.fixture(scope="module")
def target(int8_bundle: Path) -> GateGraph:
    manifest = Bundle.load(int8_bundle).manifest
    path = int8_bundle / "onnx" / "target.onnx"
    return GateGraph(path, manifest.target.cache, manifest.target.vocab_size)


@pytest.mark.parametrize("context", [0, 1, 17, 63, 110])
def test_a_row_has_the_same_bits_alone_and_among_others(target: GateGraph, context: int) -> None:
    for rows in (2, 3, 5, 9):
        block = TEXT[context : context + rows]
        target.reset()
        if context:
            target.rows(TEXT[:context])
        alone = np.concatenate([target.rows([token]) for token in block])
        target.length = context
        np.testing.assert_array_equal(target.rows(block), alone)


def test_the_row_behind_a_lone_query_is_read_by_nothing(target: GateGraph) -> None:
    """A copy of the key lies there until the next row comes; up to the last row but one."""
    target.reset()
    for token in TEXT[:-1]:
        one_by_one = target.rows([token])
    target.reset()
    target.rows(TEXT[: POSITIONS - 4])
    np.testing.assert_array_equal(target.rows(TEXT[POSITIONS - 4 : -1])[-1:], one_by_one)


def test_text_with_drafts_is_text_without_in_every_token(int8_bundle: Path) -> None:
    """Greedy, and sampled where draft = target accepts all; up to the end of the context."""
    with Decoder.load(int8_bundle, threads=1, spin=False) as decoder:
        for seed in range(6):
            prompt = TEXT[seed * 7 : seed * 7 + 9]
            params = SamplingParams(ignore_eos=True)
            plain = decoder.generate(prompt, params, num_draft_tokens=0)
            assert plain.finish_reason == "context"
            for k in (1, 2, 4):
                drafted = decoder.generate(prompt, params, num_draft_tokens=k)
                assert drafted.token_ids == plain.token_ids


def test_a_prompt_may_fill_all_but_one_row(int8_bundle: Path) -> None:
    with Decoder.load(int8_bundle, threads=1, spin=False) as decoder:
        limit = Bundle.load(int8_bundle).manifest.limits.max_context
        result = decoder.generate(TEXT[: limit - 1], SamplingParams(), num_draft_tokens=0)
        assert len(result.token_ids) == 1
        with pytest.raises(LimitExceeded):
            decoder.generate(TEXT[:limit], SamplingParams())


def test_the_gate_says_that_rows_agree(int8_bundle: Path) -> None:
    gates = {gate.name: gate for gate in Bundle.load(int8_bundle).manifest.gates}
    assert gates["engine"].figures["rows_noise"] == 0.0


def test_changes_nothing_where_nothing_is_to_be_done(int8_bundle: Path) -> None:
    path = int8_bundle / "onnx" / "target.onnx"
    model = ir.from_proto(onnx.load(path, load_external_data=False))
    attention = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert attention
    assert not RowsAlikePass()(model).modified
    for node in attention:
        del node.metadata_props["outrider.rows_alike"]
    assert RowsAlikePass()(model).modified


def test_a_build_may_do_without(kept_traces: None, build_root: Path, tiny_target: Path) -> None:
    out = build_root / "rows-not-alike"
    path = build(BuildRequest(target=str(tiny_target), draft=None, out=out, rows_alike=False))
    model = onnx.load(path / "onnx" / "target.onnx", load_external_data=False)
    assert "GroupQueryAttention" in {node.op_type for node in model.graph.node}
    assert "Expand" not in {node.op_type for node in model.graph.node}
