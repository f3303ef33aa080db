"""Bound calls: by address, checked against the contract, and clear where a graph does not fit."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from helpers_runtime import VOCAB, save_target, target_table, write_bundle

from runtime import Decoder, EngineError
from runtime.contract import CacheSpec, target_graph
from runtime.executor import Call, EngineOptions, Executor, cache_buffers

CACHE = CacheSpec(layers=1, kv_heads=1, head_dim=1, max_context=16)
OPTIONS = EngineOptions(threads=1)


@pytest.fixture
def executor(tmp_path: Path) -> Executor:
    save_target(tmp_path / "target.onnx", target_table(20), 16)
    return Executor.load(tmp_path / "target.onnx", target_graph(CACHE), OPTIONS)


def bind(executor: Executor, **changes: np.ndarray) -> tuple[Call, dict[str, np.ndarray]]:
    past = cache_buffers(CACHE.past(), CACHE.shape(1))
    arrays = {
        "input_ids": np.array([[3, 4]]),
        "past_lengths": np.zeros(1, np.int32),
        "num_logits": np.array(1),
        **past,
    } | changes
    outputs = {
        "logits": np.zeros((1, 1, 20), np.float32),
        "present.0.key": past["past_key_values.0.key"],
        "present.0.value": past["past_key_values.0.value"],
    }
    return executor.bind(arrays, outputs), arrays | outputs


def test_a_call_reads_and_writes_its_arrays_in_place(executor: Executor) -> None:
    call, arrays = bind(executor)
    address = arrays["logits"].ctypes.data
    assert call.run() > 0
    first = arrays["logits"].copy()
    assert arrays["past_key_values.0.key"].ravel()[:3].tolist() == [3, 4, 0]
    arrays["input_ids"][0, 1] = 5
    call.run()
    assert not np.array_equal(arrays["logits"], first)
    assert arrays["logits"].ctypes.data == address


def test_a_call_keeps_its_arrays_alive(executor: Executor) -> None:
    call, arrays = bind(executor)
    logits = arrays["logits"]
    call.run()
    expected = logits.copy()
    del arrays
    gc.collect()
    _ = [np.full((1, 2), 9) for _ in range(1000)]
    logits[:] = 0
    call.run()
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("past_lengths", np.zeros(1, np.int64)),
        ("past_lengths", np.zeros(2, np.int32)),
        ("past_key_values.0.key", np.zeros((1, 1, 8, 2), np.float32)),
    ],
)
def test_a_buffer_that_does_not_fit_is_named(
    executor: Executor, name: str, array: np.ndarray
) -> None:
    with pytest.raises(EngineError, match=f"{name}: received {array.dtype}"):
        bind(executor, **{name: array})


def test_a_strided_buffer_is_refused(executor: Executor) -> None:
    with pytest.raises(EngineError, match="not contiguous"):
        bind(executor, input_ids=np.zeros((1, 4), np.int64)[:, ::2])


def test_a_graph_of_another_contract_is_refused(tmp_path: Path) -> None:
    save_target(tmp_path / "target.onnx", target_table(20), 16)
    two_layers = target_graph(CacheSpec(layers=2, kv_heads=1, head_dim=1, max_context=16))
    with pytest.raises(EngineError, match=r"target\.onnx: inputs missing"):
        Executor.load(tmp_path / "target.onnx", two_layers, OPTIONS)
    longer = target_graph(CacheSpec(layers=1, kv_heads=1, head_dim=1, max_context=32))
    with pytest.raises(EngineError, match="rebuild"):
        Executor.load(tmp_path / "target.onnx", longer, OPTIONS)


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target.onnx").write_bytes(b"nothing")
    with pytest.raises(EngineError, match=r"target\.onnx: ONNX Runtime refused"):
        Executor.load(tmp_path / "target.onnx", target_graph(CACHE), OPTIONS)


def test_a_failing_run_is_an_engine_error(executor: Executor) -> None:
    call, arrays = bind(executor)
    arrays["past_lengths"][0] = 15  # two rows behind the fifteenth do not fit
    with pytest.raises(EngineError, match="failed while running"):
        call.run()


def test_nothing_is_bound_anew_while_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_bundle(tmp_path / "bundle", target_table(VOCAB), target_table(VOCAB))
    with Decoder.load(path, threads=1) as decoder:
        decoder.generate([1, 2], num_draft_tokens=3)
        monkeypatch.setattr(Executor, "bind", None)  # calling it would fail
        decoder.generate([1, 2], num_draft_tokens=3)


def test_a_manifest_of_other_graphs_is_refused(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "bundle", target_table(VOCAB), None)
    manifest = (path / "manifest.json").read_text()
    changed = manifest.replace(f'"vocab_size": {VOCAB}', f'"vocab_size": {VOCAB + 2}')
    assert changed != manifest
    (path / "manifest.json").write_text(changed)
    with pytest.raises(EngineError, match=r"target\.onnx: vocab: received 258"):
        Decoder.load(path, threads=1)
