"""Tiny checkpoints, and whole bundles built from them by the real build.

Nine tenths of a tiny build are the trace, which depends on the configuration alone: builds here
trace a configuration once, and lower, write, check and measure each time.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import VOCAB, edit_json, llama_config, random_model, tokenizer
from transformers import PretrainedConfig, PreTrainedModel

from export import eagle_engine, eagle_graph, graphs
from export.build import BuildRequest, build
from export.eagle_head import EagleHead
from export.eagle_trace import trace_head
from export.portable import make_portable
from export.trace import trace_decoder

POSITIONS, DRAFT_POSITIONS, K = 128, 48, 4
CONFIG = llama_config(
    hidden_size=64,
    intermediate_size=96,
    max_position_embeddings=POSITIONS,
    tie_word_embeddings=True,
)
KEPT = np.array(sorted({*range(0, 260, 3), *range(97, 123), 257}))  # tokens of the distilled draft
TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>{% endif %}"
)


def target_model() -> PreTrainedModel:
    """Random, but with logits that differ: greedy choices are far from ties.

    The second layer adds little, so that a draft of the first one is right now and then.
    """
    model = random_model(CONFIG)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                scale = 0.3 if "embed" in name else 1.5 * parameter.shape[1] ** -0.5
                scale *= 0.3 if ".1." in name and ("o_proj" in name or "down_proj" in name) else 1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def save_target(directory: Path) -> Path:
    target_model().save_pretrained(directory)
    tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": "<|begin|>",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def save_distilled(directory: Path) -> Path:
    """The target's first layer and a head over KEPT, as scripts/train_draft.py writes a draft.

    It borrows the target's embedding and knows fewer positions.
    """
    directory.mkdir()
    config = copy.deepcopy(CONFIG)
    config.num_hidden_layers, config.tie_word_embeddings = 1, False
    config.max_position_embeddings = DRAFT_POSITIONS
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    outrider = {"kind": "distilled-draft", "target_vocab_size": VOCAB}
    edit_json(directory / "config.json", draft_vocab_size=len(KEPT), outrider=outrider)
    state = target_model().state_dict()
    tensors = {n: t for n, t in state.items() if ".layers.0." in n or n == "model.norm.weight"}
    tensors["lm_head.weight"] = state["model.embed_tokens.weight"][torch.from_numpy(KEPT)]
    tensors = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    tensors["d2t"] = torch.from_numpy(KEPT - np.arange(len(KEPT)))
    tensors["t2d"] = torch.isin(torch.arange(VOCAB), torch.from_numpy(KEPT))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def keep_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let builds take the portable graph of a configuration that was traced before."""

    @functools.cache
    def portable(
        text: str, max_context: int, head_rows: int | None, taps: tuple[int, ...], trees: bool
    ) -> ir.Model:
        traced = trace_decoder(
            configs[text], max_context, head_rows=head_rows, taps=taps, trees=trees
        )
        return make_portable(traced)

    def trace(
        config: PretrainedConfig,
        max_context: int,
        *,
        head_rows: int | None = None,
        taps: Sequence[int] = (),
        trees: bool = False,
    ) -> ir.Model:
        values = config.to_dict()
        values.pop("_name_or_path", None)  # the only value that says where it was read from
        text = json.dumps(values, sort_keys=True, default=str)
        configs[text] = config
        return portable(text, max_context, head_rows, tuple(taps), trees).clone()

    heads: dict[str, ir.Model] = {}

    def head(given: EagleHead, max_context: int, *, trees: bool = False) -> ir.Model:
        values = {**vars(given), "config": given.config.to_json_string(), "shapes": given.shapes()}
        kept = {k: v for k, v in values.items() if k not in ("name", "sha256", "tensors", "d2t")}
        key = repr((kept, max_context, trees))
        if key not in heads:
            heads[key] = trace_head(given, max_context, trees=trees)
        return heads[key].clone()

    configs: dict[str, PretrainedConfig] = {}
    for module in (eagle_graph, eagle_engine):
        monkeypatch.setattr(module, "trace_head", head)
    monkeypatch.setattr(graphs, "trace_decoder", trace)
    monkeypatch.setattr(graphs, "make_portable", lambda model: model)


def places(graph: Path) -> dict[str, tuple[str, int, int]]:
    """Weight → file, offset and length, as the graph says."""
    found = {}
    for tensor in onnx.load(graph, load_external_data=False).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {e.key: e.value for e in tensor.external_data}
            found[tensor.name] = entry["location"], int(entry["offset"]), int(entry["length"])
    return found


def build_bundle(out: Path, target: Path, draft: Path | None, precision: str) -> Path:
    return build(
        BuildRequest(
            target=str(target),
            draft=str(draft) if draft else None,
            out=out,
            precision=precision,
            max_draft_tokens=K,
        )
    )
