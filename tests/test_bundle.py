"""Bundles: written whole or not at all, and loaded only if every byte is as it was written."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from export.bundle_writer import BundleWriter
from export.inspect import as_json, describe
from runtime.bundle import Bundle
from runtime.bundle_files import record_files
from runtime.contract import CacheSpec
from runtime.errors import BuildError, BundleError
from runtime.manifest import (
    SCHEMA,
    FileRecord,
    Gate,
    Limits,
    Manifest,
    ModelCard,
    ModelDraft,
    NgramDraft,
)

VOCAB, DRAFT_VOCAB, CONTEXT = 50, 6, 64
D2T = np.array([0, 2, 2, 5, 9, 40])
LATENCY = {
    "verify_s": {"1": 0.010, "5": 0.016},
    "accept_s": {"0": 0.0001, "4": 0.0002},
    "draft_s": 0.001,
    "draft_catch_up_s": 0.0012,
    "overhead_s": 0.0001,
}


def card(name: str, vocab_size: int) -> ModelCard:
    return ModelCard(
        name=name,
        model_type="llama",
        revision="",
        sha256="ab" * 32,
        parameters=1_000_000,
        precision="int4",
        vocab_size=vocab_size,
        cache=CacheSpec(layers=2, kv_heads=1, head_dim=8, max_context=CONTEXT),
    )


def manifest(files: dict[str, FileRecord]) -> Manifest:
    return Manifest(
        schema=SCHEMA,
        versions={"outrider": "0.1.0", "onnxruntime": "1.20.0"},
        backend="onnxruntime",
        target=card("target", VOCAB),
        draft=ModelDraft(card=card("draft", DRAFT_VOCAB)),
        limits=Limits(max_batch=2, max_context=CONTEXT, max_draft_tokens=4),
        eos_token_ids=(2,),
        bos_token_id=1,
        tokenizer_sha256=files["tokenizer.json"].sha256,
        gates=(Gate(name="parity", status="passed", figures={"max_abs_diff": 1.5e-5, "rows": 8}),),
        files=files,
    )


def fill(directory: Path) -> None:
    for name in ("onnx", "reports"):
        (directory / name).mkdir()
    for graph in ("target", "draft", "accept"):
        (directory / "onnx" / f"{graph}.onnx").write_bytes(graph.encode() * 100)
    (directory / "onnx" / "weights.data").write_bytes(bytes(range(256)) * 40)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "generation_config.json").write_text('{"eos_token_id": [2]}')
    np.save(directory / "d2t.npy", D2T)
    (directory / "reports" / "latency.json").write_text(json.dumps(LATENCY))


def build(
    out: Path,
    *,
    make: Callable[[dict[str, FileRecord]], Manifest] = manifest,
    also: Callable[[Path], object] = lambda directory: None,
) -> Path:
    """Write a bundle; `also` is called with its directory, once the usual files are there."""
    with BundleWriter(out) as writer:
        fill(writer.directory)
        also(writer.directory)
        return writer.finish(make)


def raises(error: BaseException) -> Callable[[Path], object]:
    def fail(directory: Path) -> None:
        raise error

    return fail


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return build(tmp_path / "bundle")


def rewrite(path: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Make a manifest that fits the files as they now are, then change it."""
    fitting = manifest(record_files(path))
    (path / "manifest.json").write_text(change(fitting).to_json())


def leftovers(path: Path) -> list[Path]:
    return sorted(path.glob(".*"))


# A sound bundle


def test_what_was_written_is_loaded(bundle: Path) -> None:
    loaded = Bundle.load(bundle)
    assert loaded.manifest == manifest(record_files(bundle))
    assert set(loaded.manifest.files) == {
        *(f"onnx/{graph}.onnx" for graph in ("target", "draft", "accept")),
        *("onnx/weights.data", "tokenizer.json", "chat_template.jinja"),
        *("generation_config.json", "d2t.npy"),
    }
    assert loaded.chat_template == "{{ messages }}"
    assert loaded.generation_config == {"eos_token_id": [2]}
    assert loaded.latency == LATENCY
    assert loaded.model_path("draft").read_bytes().startswith(b"draft")
    assert loaded.tokenizer_path.read_text() == "{}"
    np.testing.assert_array_equal(loaded.d2t, D2T, strict=True)
    assert leftovers(bundle.parent) == []


def test_reports_may_change_and_grow(bundle: Path) -> None:
    (bundle / "reports" / "bench.json").write_text("{}")
    (bundle / "reports" / "latency.json").write_text(json.dumps(LATENCY | {"draft_s": 2.0}))
    assert Bundle.load(bundle).latency == LATENCY | {"draft_s": 2.0}
    shutil.rmtree(bundle / "reports")
    assert Bundle.load(bundle).latency is None


def test_optional_parts(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "plain") as writer:
        fill(writer.directory)
        for name in ("chat_template.jinja", "d2t.npy", "onnx/draft.onnx"):
            (writer.directory / name).unlink()
        writer.finish(lambda files: replace(manifest(files), draft=None))
    loaded = Bundle.load(tmp_path / "plain")
    assert (loaded.chat_template, loaded.d2t, loaded.manifest.draft) == (None, None, None)


def test_inspection_names_everything(bundle: Path) -> None:
    loaded = Bundle.load(bundle)
    raw = json.loads(json.dumps(as_json(loaded)))
    assert raw["target"]["precision"] == "int4"
    assert raw["kv_cache_bytes"] == 2 * loaded.manifest.target.cache.bytes(2)
    text = io.StringIO()
    Console(file=text, width=160).print(*describe(loaded))
    for part in ("target", "int4", "max_abs_diff 1.5e-05", "onnx/weights.data", "64 tokens"):
        assert part in text.getvalue()


def test_predicted_speedup_is_leviathans(bundle: Path) -> None:
    row = as_json(Bundle.load(bundle))["predicted_speedup"][3]  # k = 4
    round_s = 0.016 + 0.0002 + 4 * 0.001 + 0.0001 + 0.5**4 * 0.0002
    committed = (1 - 0.5**5) / (1 - 0.5)
    assert row["k"] == 4
    assert row["speedup_at_0.5"] == pytest.approx(committed * 0.0102 / round_s)


# Damage


def test_truncated_file(bundle: Path) -> None:
    path = bundle / "onnx" / "weights.data"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"onnx/weights\.data: received 10239 bytes"):
        Bundle.load(bundle, verify=False)


def test_flipped_byte(bundle: Path) -> None:
    path = bundle / "onnx" / "weights.data"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    Bundle.load(bundle, verify=False)  # sizes alone do not show it
    with pytest.raises(BundleError, match=r"onnx/weights\.data: received sha256"):
        Bundle.load(bundle)


@pytest.mark.parametrize("name", ["onnx/draft.onnx", "tokenizer.json", "d2t.npy"])
def test_missing_file(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    with pytest.raises(BundleError, match=f"missing .*{name}"):
        Bundle.load(bundle)


def test_extra_file(bundle: Path) -> None:
    (bundle / "onnx" / "more.bin").write_bytes(b"?")
    with pytest.raises(BundleError, match=r"does not list \['onnx/more\.bin'\]"):
        Bundle.load(bundle)


def test_required_files(bundle: Path) -> None:
    (bundle / "onnx" / "accept.onnx").unlink()
    rewrite(bundle, lambda m: m)
    with pytest.raises(BundleError, match="accept"):
        Bundle.load(bundle)


# Paths that lead out


@pytest.mark.parametrize("name", ["onnx/weights.data", "reports/latency.json", "reports/more.json"])
def test_links_are_refused(bundle: Path, name: str) -> None:
    """Even where the content is the same, and in reports too."""
    outside, inside = bundle.parent / "outside", bundle / name
    outside.write_bytes(inside.read_bytes() if inside.exists() else b"{}")
    inside.unlink(missing_ok=True)
    inside.symlink_to(outside)
    with pytest.raises(BundleError, match=f"{name}: received a link"):
        Bundle.load(bundle)


def test_linked_directories_are_refused(bundle: Path) -> None:
    (bundle / "onnx").rename(bundle.parent / "elsewhere")
    (bundle / "onnx").symlink_to(bundle.parent / "elsewhere")
    with pytest.raises(BundleError, match="onnx: received a link"):
        Bundle.load(bundle)


def test_linked_manifest_is_refused(bundle: Path) -> None:
    (bundle / "manifest.json").rename(bundle.parent / "manifest.json")
    (bundle / "manifest.json").symlink_to(bundle.parent / "manifest.json")
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        Bundle.load(bundle)


@pytest.mark.parametrize(
    "name",
    [
        *("../outside", "onnx/../../outside", "{root}/outside", "onnx//x", "./x", "a\\..\\b", ""),
        *(".", "manifest.json", "reports/latency.json", "a\0b"),
    ],
)
def test_names_that_are_no_plain_paths(bundle: Path, name: str) -> None:
    (bundle.parent / "outside").write_bytes(b"x")
    name = name.format(root=bundle.parent)
    record = FileRecord(sha256="0" * 64, bytes=1)
    rewrite(bundle, lambda m: replace(m, files=m.files | {name: record}))
    with pytest.raises(BundleError, match="plain path inside"):
        Bundle.load(bundle)


def test_a_fifo_does_not_hang_the_loader(bundle: Path) -> None:
    os.mkfifo(bundle / "reports" / "pipe")
    with pytest.raises(BundleError, match="special file"):
        Bundle.load(bundle)


# Values that do not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: replace(m, backend="abacus"), "'abacus'"),
        (lambda m: replace(m, versions={"onnxruntime": "999.0.1"}), r"Expected 999\.0\.1 or newer"),
        (lambda m: replace(m, versions={"onnxruntime": "one"}), "'one'"),
        (lambda m: replace(m, tokenizer_sha256="0"), "tokenizer"),
        (
            lambda m: replace(m, draft=ModelDraft(card=card("draft", DRAFT_VOCAB + 1))),
            r"d2t\.npy.*\[7\]",
        ),
        (lambda m: replace(m, draft=NgramDraft(min_ngram=2, max_ngram=4)), r"d2t\.npy.*\[0\]"),
        (lambda m: replace(m, target=card("target", 40)), "below 40"),
        (
            lambda m: replace(m, limits=Limits(max_batch=1, max_context=32, max_draft_tokens=1)),
            "64 rows. Expected max_context 32",
        ),
        (lambda m: with_draft_cache(m, CONTEXT + 1), "draft: received a cache of 65 rows"),
        (lambda m: with_draft_cache(m, 7), "7 rows. Expected 8 to 64"),
    ],
)
def test_manifests_that_do_not_fit(
    bundle: Path, change: Callable[[Manifest], Manifest], message: str
) -> None:
    rewrite(bundle, change)
    with pytest.raises(BundleError, match=message):
        Bundle.load(bundle)


def with_draft_cache(given: Manifest, rows: int) -> Manifest:
    assert given.draft_model is not None
    cache = replace(given.draft_model.cache, max_context=rows)
    return replace(given, draft=ModelDraft(card=replace(given.draft_model, cache=cache)))


def test_a_draft_may_know_less_context(bundle: Path) -> None:
    """Its cache starts anew when it is full; two rounds must fit."""
    rewrite(bundle, lambda m: with_draft_cache(m, 8))
    assert Bundle.load(bundle).manifest.limits.max_context == CONTEXT


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d2t.npy", b"not numpy", "d2t.npy"),
        ("d2t.npy", b"", "d2t.npy"),
        ("generation_config.json", b"[]", "JSON object"),
        ("generation_config.json", b"{", "no JSON"),
        ("reports/latency.json", b"\xff", "no JSON"),
    ],
)
def test_broken_small_files(bundle: Path, name: str, content: bytes, message: str) -> None:
    (bundle / name).write_bytes(content)
    rewrite(bundle, lambda m: m)
    with pytest.raises(BundleError, match=message):
        Bundle.load(bundle)


def test_pickled_arrays_are_not_run(bundle: Path) -> None:
    np.save(bundle / "d2t.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    rewrite(bundle, lambda m: m)
    with pytest.raises(BundleError, match=r"d2t\.npy"):
        Bundle.load(bundle)


def test_what_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such directory"):
        Bundle.load(tmp_path / "nothing")
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        Bundle.load(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="a file"):
        Bundle.load(tmp_path / "file")


# Writing


def test_an_existing_output_is_left_alone(bundle: Path) -> None:
    with pytest.raises(BuildError, match=r"path that exists.*choose another or remove"):
        build(bundle)
    Bundle.load(bundle)
    assert leftovers(bundle.parent) == []


def test_an_output_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "bundle"

    def meanwhile(files: dict[str, FileRecord]) -> Manifest:
        out.mkdir()
        return manifest(files)

    with pytest.raises(BuildError, match="exists"):
        build(out, make=meanwhile)
    assert list(out.iterdir()) == []
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("error", [ValueError("a pass failed"), KeyboardInterrupt()])
def test_a_failed_build_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        build(tmp_path / "bundle", also=raises(error))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_that_a_library_swallows_still_ends_the_build(
    tmp_path: Path, number: int, error: type[BaseException]
) -> None:
    """As native code does whose callback into Python was interrupted."""
    before = signal.getsignal(number)
    signal.signal(number, signal.default_int_handler)  # the runner's may be ignored

    def swallow(_: Path) -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)

    try:
        with pytest.raises(error):
            build(tmp_path / "bundle", also=swallow)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_writer_says_so(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="never finished"), BundleWriter(tmp_path / "bundle"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_links_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="link"):
        build(tmp_path / "bundle", also=lambda d: (d / "onnx" / "link").symlink_to("target.onnx"))
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BuildError, match="a place that can be written"):
        build(tmp_path / "file" / "bundle")


SLOW_BUILD = """
import sys, time
sys.path[:0] = [{tests!r}]
import test_bundle
from export.bundle_writer import BundleWriter
with BundleWriter({out!r}) as writer:
    test_bundle.fill(writer.directory)
    if {late!r}:
        def make(files):
            made = test_bundle.manifest(files)
            (writer.directory / "manifest.json").write_text(made.to_json())
            return wait(made)
    else:
        make = test_bundle.manifest
    def wait(made=None):
        print("writing", flush=True)
        time.sleep(60)
        return made
    if not {late!r}:
        wait()
    writer.finish(make)
"""


def interrupted_build(root: Path, out: Path, number: int, *, late: bool = False) -> int:
    """Start a real build in a process of its own and send it a signal in the middle."""
    code = SLOW_BUILD.format(tests=str(Path(__file__).parent), out=str(out), late=late)
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as stdout:
        assert stdout.readline() == "writing\n"
        process.send_signal(number)
        return process.wait(timeout=30)


@pytest.mark.parametrize("late", [False, True], ids=["before the manifest", "before the rename"])
def test_kill_leaves_no_bundle_and_the_next_build_cleans_up(
    tmp_path: Path, root: Path, late: bool
) -> None:
    out = tmp_path / "bundle"
    assert interrupted_build(root, out, signal.SIGKILL, late=late) == -signal.SIGKILL
    assert not out.exists()
    (partial,) = leftovers(tmp_path)
    assert (partial / "onnx" / "target.onnx").exists()
    with pytest.raises(BundleError, match="unfinished build"):
        Bundle.load(partial)
    build(out)
    assert sorted(tmp_path.iterdir()) == [out]
    Bundle.load(out)


def test_terminate_cleans_up(tmp_path: Path, root: Path) -> None:
    number = interrupted_build(root, tmp_path / "bundle", signal.SIGTERM)
    assert number == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_running_build_is_left_alone(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "bundle") as running:
        fill(running.directory)
        running.directory.rename(tmp_path / ".bundle.partial-1")  # as of another process
        with pytest.raises(ValueError, match="stop"):
            build(tmp_path / "bundle", also=raises(ValueError("stop")))
        assert (tmp_path / ".bundle.partial-1").exists()
        (tmp_path / ".bundle.partial-1").rename(running.directory)
        running.finish(manifest)
    Bundle.load(tmp_path / "bundle")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 kB; needs root."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = shutil.which("mount") is not None and (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True
        ).returncode
        == 0
    )
    if not mounted:
        pytest.skip("cannot mount a tmpfs here (needs root); the next test stands in")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_full_disk(small_disk: Path) -> None:
    with pytest.raises(BuildError, match=r"full disk \(\d+ bytes free.*free some"):
        build(small_disk / "bundle", also=lambda d: (d / "big.data").write_bytes(bytes(2**20)))
    assert list(small_disk.iterdir()) == []


def test_full_disk_inside_a_native_library(small_disk: Path) -> None:
    """The tokenizers library raises a bare Exception for it."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    large = Tokenizer(BPE(vocab={f"token{i:06}": i for i in range(30_000)}, merges=[]))
    with pytest.raises(BuildError, match="full disk"):
        build(small_disk / "bundle", also=lambda d: large.save(str(d / "tokenizer.json")))
    assert list(small_disk.iterdir()) == []


def test_full_disk_as_the_kernel_reports_it(tmp_path: Path) -> None:
    """Where no file system can be mounted: the OSError of a write that finds no room."""
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(BuildError, match="full disk"):
        build(tmp_path / "bundle", also=raises(error))
    assert list(tmp_path.iterdir()) == []
