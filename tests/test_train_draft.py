"""The draft trainer on a tiny target: determinism, resuming, layout, learning, errors."""

import json
import lzma
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import train_draft  # noqa: E402
from draft_training import evaluate, labels, student, text, training  # noqa: E402

VOCAB, DRAFT_VOCAB, LAYERS, HELD_OUT = 200, 96, 3, 60
Run = Callable[..., "Result"]


class Result:
    """One run of the command."""

    def __init__(self, out: Path, exit_code: int, stdout: str, stderr: str) -> None:
        self.out, self.exit_code, self.stdout, self.stderr = out, exit_code, stdout, stderr

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.out / "model.safetensors")

    @property
    def figures(self) -> dict[str, float]:
        return json.loads(self.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama, peaked enough that its text can be learnt."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,  # large: a layer left out must be missed
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    path = tmp_path_factory.mktemp("target")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def conversations(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text which that target wrote: half greedy, half sampled."""
    torch.manual_seed(6)
    model = LlamaForCausalLM.from_pretrained(target).eval()
    path = tmp_path_factory.mktemp("text") / "answers.jsonl.xz"
    with lzma.open(path, "wt") as lines:
        for heat in (0.0, 0.8):
            prompts = torch.randint(3, VOCAB, (120, 6))
            prompts[:, 3:] = torch.randint(3, 12, (120, 3))  # few endings: text that repeats
            answers = _generate(model, prompts, heat)
            for i, ids in enumerate(answers.tolist()):
                row = {"ids": ids[: 22 + i % 9], "p": 6, "t": heat}
                lines.write(json.dumps(row) + "\n")
    return path


@torch.inference_mode()
def _generate(model: LlamaForCausalLM, ids: torch.Tensor, heat: float) -> torch.Tensor:
    for _ in range(24):
        logits = model(ids).logits[:, -1]
        best = logits.argmax(-1, keepdim=True)
        drawn = torch.multinomial((logits / heat).softmax(-1), 1) if heat else best
        ids = torch.cat([ids, drawn], 1)
    return ids


def _call(folder: Path, name: str, **options: object) -> Result:
    """Run the command in this process with quick defaults which ``options`` override."""
    given = {
        "out": folder / name,
        "work": folder / f"{name}-work",
        "layers": 2,
        "draft-vocab": DRAFT_VOCAB,
        "held-out": HELD_OUT,
        "epochs": 2,
        "batch-tokens": 256,
        "threads": 1,
    }
    given |= {key.replace("_", "-"): value for key, value in options.items()}
    arguments = [f"--{key}={value}" for key, value in given.items()]
    done = CliRunner().invoke(train_draft.app, [*arguments, "--json"])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Result(Path(str(given["out"])), done.exit_code, done.stdout, done.stderr)


@pytest.fixture
def run(target: Path, conversations: Path, tmp_path: Path) -> Run:
    """Run the command on the tiny target; keyword arguments override its options."""

    def call(name: str = "draft", **options: object) -> Result:
        return _call(tmp_path, name, **{"target": target, "text": conversations} | options)

    return call


@pytest.fixture(scope="module")
def whole(target: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One uninterrupted run with the default options."""
    folder = tmp_path_factory.mktemp("whole")
    return _call(folder, "draft", target=target, text=conversations, licence="apache-2.0")


def test_layout_is_exact(whole: Result) -> None:
    result = whole
    assert sorted(p.name for p in result.out.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    config = json.loads((result.out / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert config["tie_word_embeddings"] is False
    assert config["draft_vocab_size"] == DRAFT_VOCAB
    assert config["outrider"] == {
        "kind": "distilled-draft",
        "layer_ids": [0, 2],
        "target_vocab_size": VOCAB,
    }
    layer = ["input_layernorm", "post_attention_layernorm"]
    layer += [f"self_attn.{name}_proj" for name in "qkvo"]
    layer += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    expected = {f"model.layers.{i}.{name}.weight" for i in (0, 1) for name in layer}
    weights = result.weights
    assert set(weights) == expected | {"model.norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert weights["lm_head.weight"].shape == (DRAFT_VOCAB, 32)
    floats = {t.dtype for name, t in weights.items() if name not in ("d2t", "t2d")}
    assert floats == {torch.float16}
    ids = torch.arange(DRAFT_VOCAB) + weights["d2t"]
    assert weights["d2t"].dtype == torch.int64
    assert ids.tolist() == weights["t2d"].nonzero()[:, 0].tolist()
    assert {1, 2} <= set(ids.tolist()), "special tokens always get in"
    card = (result.out / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert f"--draft-vocab {DRAFT_VOCAB}" in card
    assert "--threads 1" in card, "it decides the last bits"
    assert "--work" not in card
    assert str(result.out.parent) not in card


def test_same_seed_same_bits(run: Run, whole: Result) -> None:
    again, other = run("again"), run("other", seed=1)
    assert _equal(again.weights, whole.weights)
    assert again.figures | {"out": ""} == whole.figures | {"out": ""}
    assert not _equal(other.weights, whole.weights)


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_killed_and_resumed_equals_uninterrupted(
    run: Run, whole: Result, target: Path, conversations: Path, tmp_path: Path
) -> None:
    """SIGKILL once in labelling and once in training, then run the same command again."""
    work = tmp_path / "killed-work"
    options = {"target": target, "text": conversations, "work": work, "out": tmp_path / "killed"}
    options |= {"layers": 2, "draft-vocab": DRAFT_VOCAB, "held-out": HELD_OUT, "epochs": 2}
    options |= {"threads": 1, "batch-tokens": 256}
    died = subprocess.run(
        [sys.executable, "-c", _KILLED, *(f"--{k}={v}" for k, v in options.items())],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert died.stdout.split() == [str(signal.SIGKILL.value)] * 2, died.stdout + died.stderr
    assert (work / "train.pt").exists()
    assert not (tmp_path / "killed").exists()
    assert _equal(run("resumed", work=work).weights, whole.weights)


# Two children of one process, for the imports take longer than the runs.
_KILLED = """
import os, signal, sys
import train_draft
from draft_training import labels, training

def dying_write(path, write, original=labels.write_atomic):
    if path.name == "chunk-00001.npz":  # after the temporary file, before the rename
        write(path.with_name(".part"))
        os.kill(os.getpid(), signal.SIGKILL)
    original(path, write)

def dying_step(self, batch, began, original=training.Trainer._step):
    if self.cursor.step == 5:
        self.save()
    if self.cursor.step == 8:  # past the checkpoint: three steps are lost and done again
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, batch, began)

for module, name, dying in (
    (labels, "write_atomic", dying_write), (training.Trainer, "_step", dying_step)
):
    child = os.fork()
    if not child:
        setattr(module, name, dying)
        train_draft.app()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) * -1, flush=True)
"""


def test_shards_and_a_waiting_trainer_equal_one_process(
    run: Run, whole: Result, tmp_path: Path
) -> None:
    work = tmp_path / "shared"
    for shard in ("1/2", "0/2"):
        assert run("labels", work=work, phase="label", shard=shard).exit_code == 0
    assert _equal(run("trained", work=work, phase="train").weights, whole.weights)


def test_acceptance_rises(run: Run) -> None:
    """Fails when the labels, the loss or the optimizer point the wrong way.

    Seen with these seeds: overlap 0.443 -> 0.492, agreement 0.203 -> 0.317; the bars are about
    half of that. One step at the start of the warmup stands for "untrained".
    """
    start = run("start", epochs=0.02).figures
    trained = run("trained", epochs=10).figures
    assert trained["overlap_sampled"] > start["overlap_sampled"] + 0.03
    assert trained["agreement"] > start["agreement"] + 0.06
    assert trained["overlap_sampled"] <= trained["vocabulary_mass"] + 1e-3


def test_undistilled_copy_of_all_layers_agrees(target: Path) -> None:
    """With every layer and the whole vocabulary the student is the target."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    copied = student.Student(model, range(LAYERS), torch.arange(VOCAB)).eval()
    tokens = torch.randint(0, VOCAB, (2, 9))
    with torch.inference_mode():
        ours = copied(tokens, torch.arange(18)).view(2, 9, VOCAB)
        theirs = model(tokens).logits
    # f32 through the same kernels; the head's rows are gathered, so the order of sums may differ.
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("k", [1, 4])
def test_round_length_walks_like_a_decoder(k: int) -> None:
    """Against a plain simulation of greedy rounds, where acceptances are 0 or 1."""
    rng = np.random.default_rng(3)
    accepts = [rng.random(n) < 0.6 for n in (1, 7, 40)]
    rounds = 0
    for accept in accepts:
        t = 0
        while t < len(accept):
            drafted = 0
            while drafted < k and t + drafted < len(accept) and accept[t + drafted]:
                drafted += 1
            t, rounds = t + drafted + 1, rounds + 1
    floats = [a.astype(np.float64) for a in accepts]
    assert evaluate.round_length(floats, k) == pytest.approx(48 / rounds)


def test_padding_does_not_reach_the_labels(target: Path, conversations: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    rows = text.read_conversations(conversations)[:5]
    head = model.get_output_embeddings().weight[:DRAFT_VOCAB]
    together = labels.label_chunk(model, rows, head)["top_p"]
    alone = [labels.label_chunk(model, [row], head)["top_p"] for row in rows]
    # f16 storage: half a unit in the last place of a probability below 1 is 2.4e-4.
    np.testing.assert_allclose(together, np.concatenate(alone), atol=5e-4)


def test_loss_weights(target: Path) -> None:
    """A q equal to p has no KL and overlaps by the mass which the stored top holds."""
    p = torch.tensor([[0.5, 0.3, 0.2]])
    ids = torch.tensor([[2, 0, 1]])
    logits = torch.tensor([[0.3, 0.2, 0.5]]).log()
    for weight in (0.0, 0.7):
        loss, overlap = student.distillation_loss(logits, ids, p, weight)
        assert loss.item() == pytest.approx(0, abs=1e-6)
        assert overlap.item() == pytest.approx(1, abs=1e-6)


def test_learning_rate_ends_at_zero() -> None:
    options = training.TrainOptions(epochs=1)
    assert options.lr(0.0, 0) < options.lr(0.05, 60)
    assert options.lr(1.0, 1000) == pytest.approx(0)


def test_length_of_the_run_matters_only_in_its_decay() -> None:
    options = training.TrainOptions(epochs=1)
    before = 1 - options.decay_share
    assert {options.lr(p, 99) for p in (0.1, 0.3, before)} == {options.peak_lr}
    assert {options.overlap(p) for p in (0.1, 0.3, before)} == {0.0}
    assert options.overlap(1.0) == pytest.approx(options.overlap_weight)


def _write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_bad_text(run: Run, tmp_path: Path) -> None:
    cases = {
        "is not a file": tmp_path / "absent.jsonl",
        "none with an answer": _write(tmp_path / "a.jsonl", {"ids": [4, 5], "p": 2, "t": 0}),
        f"token id {VOCAB}. Expected 0 <= id < {VOCAB}": _write(
            tmp_path / "b.jsonl", {"ids": [4, VOCAB], "p": 1, "t": 0}
        ),
        "1 <= p <= len(ids)": _write(tmp_path / "c.jsonl", {"ids": [4, 5], "p": 0, "t": 0}),
        "c2.jsonl:1: received": _write(tmp_path / "c2.jsonl", {"ids": [4, 5]}),
        f"--held-out: received {HELD_OUT} of 1": _write(
            tmp_path / "d.jsonl", {"ids": [4, 5], "p": 1, "t": 0}
        ),
    }
    for message, path in cases.items():
        _refused(run(text=path), message)


def test_bad_options(run: Run, tmp_path: Path) -> None:
    _refused(run(layers=LAYERS + 1), f"--layers: received {LAYERS + 1}. Expected 1 to {LAYERS}")
    _refused(run(layer_ids="0,3"), "--layer-ids: received 0,3. Expected ids from 0 to 2")
    _refused(run(layer_ids="0,x"), "Expected layer numbers")
    _refused(run(draft_vocab=VOCAB + 1), f"--draft-vocab: received {VOCAB + 1}")
    _refused(run(shard="2/2"), "INDEX < COUNT")
    _refused(run(target=tmp_path / "absent"), "neither a directory nor a .gguf file")
    _refused(run(target=tmp_path), f"--target: {tmp_path} doesn't load")
    _refused(run(minutes=0), "run the same command with more minutes")


def test_existing_out_is_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "mine.txt").write_text("keep")
    _refused(run(), "exists. Expected a new or empty directory")
    assert (tmp_path / "draft" / "mine.txt").read_text() == "keep"


def test_work_of_another_run_is_refused(run: Run, tmp_path: Path) -> None:
    work = tmp_path / "work"
    run("a", work=work)
    _refused(run("b", work=work, seed=3), "holds labels of another run")
    _refused(run("c", work=work, epochs=5), "belongs to a run with")


def _refused(result: Result, message: str) -> None:
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not (result.out / "model.safetensors").exists()
