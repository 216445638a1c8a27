"""What a model is: the same wherever it was loaded from, and another one if one bit is."""

import json
import os
import pwd
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lmc.commands.learn.manifest import manifest_path
from lmc.connectors.transformers.hf import identity
from lmc.connectors.vllm.model_identity import model_identity, weights_in_memory
from lmc.engine import identity as module
from lmc.engine.identity import (
    FRESH_SECONDS,
    NOT_KV,
    adapter_stamp,
    checkpoint_files,
    identity_of_files,
    identity_of_parameters,
    rope_name,
)
from lmc.errors import InputError

CONFIG = {"hidden_size": 64, "rope_parameters": {"rope_theta": 1e4}, "architectures": ["A"], "dtype": "float32"}
FORGED = "f0" * 16  # the digest of no file


@pytest.fixture(autouse=True)
def remembered(tmp_path, monkeypatch):
    """The file with the digests, another one for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lmc" / "checkpoints.json"


@pytest.fixture
def clock(monkeypatch):
    """Sets how many seconds after the last change of a file it is."""

    def set_clock(seconds, path):
        now = path.stat().st_ctime + seconds
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now))

    return set_clock


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "model-2.safetensors").write_bytes(b"weights")
    (folder / "modeling.py").write_text("scale = 1.0\n")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def later(checkpoint, clock):
    """Set the clock so long after the checkpoint was written that the checkpoint's digests are remembered."""
    clock(10 * FRESH_SECONDS, checkpoint / "config.json")


def identity_of(folder, *also):
    return identity_of_files(checkpoint_files(folder), also)


def copied(folder, name):
    return Path(shutil.copytree(folder, folder.parent / name))


def flip(path, at=-1):
    blob = bytearray(path.read_bytes())
    blob[at] ^= 1
    path.write_bytes(blob)


def configured(folder, **changed):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    return identity_of(folder)


def until_its_times_differ(path, before):
    """A file system's clock goes in steps: a file that is changed twice within one has the same times."""
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_copy_elsewhere_has_the_same_identity(checkpoint):
    assert identity_of(copied(checkpoint, "copy")) == identity_of(checkpoint)


def test_links_to_the_files_have_the_same_identity(checkpoint):
    """A hub's snapshot consists of links whose targets are named by digests."""
    folder, blobs = checkpoint.parent / "snapshot", copied(checkpoint, "blobs")
    folder.mkdir()
    for i, path in enumerate(sorted(blobs.iterdir())):
        (folder / path.name).symlink_to(path.rename(blobs / f"blob{i}"))
    assert identity_of(folder) == identity_of(checkpoint)


@pytest.mark.usefixtures("later")
def test_a_file_that_is_only_touched_keeps_its_identity(checkpoint):
    before = identity_of(checkpoint)
    for path in checkpoint.iterdir():
        os.utime(path, (1, 1))
    assert identity_of(checkpoint) == before


@pytest.mark.parametrize("name", ["model-1.safetensors", "model-2.safetensors", "modeling.py"])
@pytest.mark.parametrize("at", [0, -1])
def test_one_bit_of_any_file_makes_another_identity(checkpoint, name, at):
    before = identity_of(checkpoint)
    flip(checkpoint / name, at)
    assert identity_of(checkpoint) != before


def test_bits_behind_the_first_block_that_is_read_count(checkpoint, monkeypatch):
    monkeypatch.setattr(module, "READ_BYTES", 1000)
    before = identity_of(checkpoint)
    assert before == identity_of(copied(checkpoint, "copy"))
    for at in (999, 1000, 5000, 10239):
        flip(checkpoint / "model-1.safetensors", at)
        assert identity_of(checkpoint) != before
        flip(checkpoint / "model-1.safetensors", at)
    assert identity_of(checkpoint) == before


def test_the_size_of_the_blocks_that_are_read_does_not_count(checkpoint, monkeypatch):
    before = identity_of(checkpoint)
    monkeypatch.setattr(module, "READ_BYTES", 1001)
    assert identity_of(checkpoint) == before


def test_files_that_change_their_names_or_their_number_make_another_identity(checkpoint):
    identities = {identity_of(checkpoint)}
    one, other = (checkpoint / f"model-{i}.safetensors" for i in (1, 2))
    one.rename(checkpoint / "aside")
    identities.add(identity_of(checkpoint))
    other.rename(one)
    (checkpoint / "aside").rename(other)
    identities.add(identity_of(checkpoint))
    other.rename(checkpoint / "model-3.safetensors")
    identities.add(identity_of(checkpoint))
    (checkpoint / "modeling.py").unlink()
    identities.add(identity_of(checkpoint))
    assert len(identities) == 5


def test_options_of_the_loader_make_another_identity(checkpoint):
    assert len({identity_of(checkpoint, *also) for also in ((), ("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",))}) == 6


@pytest.mark.parametrize("name", sorted(NOT_KV))
def test_entries_of_the_config_that_do_not_change_kv_do_not_count(checkpoint, name):
    assert configured(checkpoint) == configured(checkpoint, **{name: "another"})


@pytest.mark.parametrize("changed", [{"hidden_size": 65}, {"rope_parameters": {"rope_theta": 2e4}}, {"new": None}])
def test_all_other_entries_of_the_config_count(checkpoint, changed):
    assert configured(checkpoint) != configured(checkpoint, **changed)


def test_how_a_config_is_written_does_not_count(checkpoint):
    before = identity_of(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=4))
    assert identity_of(checkpoint) == before


def test_the_files_of_a_checkpoint_are_its_weights_its_code_and_its_config(checkpoint):
    for name in ("tokenizer.json", "generation_config.json", "model.safetensors.index.json", "model.bin"):
        (checkpoint / name).write_text("{}")
    wanted = ["config.json", "model-1.safetensors", "model-2.safetensors", "modeling.py"]
    assert sorted(path.name for path in checkpoint_files(checkpoint)) == wanted
    for name in ("model-1", "model-2"):
        (checkpoint / f"{name}.safetensors").unlink()
    assert sorted(path.name for path in checkpoint_files(str(checkpoint)))[:2] == ["config.json", "model.bin"]


def test_vllm_and_transformers_give_a_checkpoint_one_identity(checkpoint):
    """Otherwise one would not find the documents of the other."""
    model = SimpleNamespace(
        model=str(checkpoint),
        revision=None,
        hf_overrides={},
        quantization=None,
        hf_config=SimpleNamespace(to_dict=dict),
    )
    config = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"), model_config=model)
    assert model_identity(config, []) == identity(None, checkpoint)


def test_a_checkpoint_may_be_one_file(checkpoint):
    path = checkpoint / "model.gguf"
    path.write_bytes(b"gguf")
    assert checkpoint_files(path) == [path]


def test_without_weights_there_are_no_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_files(tmp_path) == []
    assert checkpoint_files("nobody/has-this-model") == []


# -- digests that are remembered -----------------------------------------------------------------------------------


def forged(remembered, path, **changed):
    """Replace what is remembered of a file: its digest, and maybe its size or a time."""
    known = json.loads(remembered.read_text())
    size, modified, created, _ = known[str(path.resolve())]
    entry = {"size": size, "modified": modified, "created": created, "digest": FORGED, **changed}
    known[str(path.resolve())] = list(entry.values())
    remembered.write_text(json.dumps(known))


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("name", ["model-1.safetensors", "modeling.py", "config.json"])
def test_a_remembered_digest_is_used(checkpoint, remembered, name):
    """A remembered digest is used, right or wrong, because the file is not read again."""
    before = identity_of(checkpoint)
    forged(remembered, checkpoint / name)
    assert identity_of(checkpoint) != before


@pytest.mark.usefixtures("later")
def test_without_a_home_directory_nothing_is_remembered(checkpoint, monkeypatch):
    """A container's user without a name, and without HOME, ended the start with an error."""
    before = identity_of(checkpoint)
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert identity_of(checkpoint) == before
    with pytest.raises(InputError, match="set HOME or XDG_CACHE_HOME"):
        manifest_path("http://localhost:8000")


@pytest.mark.usefixtures("later")
def test_the_second_start_reads_no_weights(checkpoint, monkeypatch):
    before, read = identity_of(checkpoint), []
    monkeypatch.setattr(module, "_read", read.append)
    assert identity_of(checkpoint) == before
    assert read == []


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("changed", [{"size": 1}, {"modified": 1}, {"created": 1}])
def test_a_digest_is_used_only_for_a_file_of_the_same_size_and_times(checkpoint, remembered, changed):
    before = identity_of(checkpoint)
    forged(remembered, checkpoint / "model-1.safetensors", **changed)
    assert identity_of(checkpoint) == before
    forged(remembered, checkpoint / "model-1.safetensors")
    assert identity_of(checkpoint) != before, "the right entry was remembered anew"


@pytest.mark.usefixtures("later")
def test_a_digest_is_used_only_for_its_path(checkpoint, remembered):
    before = identity_of(checkpoint)
    forged(remembered, checkpoint / "model-1.safetensors")
    assert identity_of(copied(checkpoint, "copy")) == before


@pytest.mark.usefixtures("later")
def test_a_change_that_hides_its_time_is_seen(checkpoint):
    """Copying with its times gives a file the time of modification that another one had; not that of the change."""
    path = checkpoint / "model-1.safetensors"
    before, status = identity_of(checkpoint), path.stat()
    flip(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    until_its_times_differ(path, status)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert identity_of(checkpoint) != before


@pytest.mark.parametrize(("age", "kept"), [(0.0, False), (-50.0, False), (0.9, False), (1.1, True), (1000.0, True)])
def test_a_file_that_has_just_been_changed_is_not_remembered(checkpoint, clock, remembered, age, kept):
    """A file may change again within the same step of the file system's clock. `age` is in multiples of the limit."""
    path = checkpoint / "model-1.safetensors"
    clock(age * FRESH_SECONDS, path)
    identity_of_files([path])
    assert remembered.exists() == kept


def test_a_file_whose_time_was_set_back_has_just_been_changed_all_the_same(checkpoint, clock, remembered):
    """A program that unpacks an archive sets the times that files had there."""
    path = checkpoint / "model-1.safetensors"
    os.utime(path, (1, 1))
    clock(0.9 * FRESH_SECONDS, path)
    identity_of_files([path])
    assert not remembered.exists()


def test_a_file_whose_time_lies_in_the_future_is_not_remembered_before_that(checkpoint, clock, remembered):
    path = checkpoint / "model-1.safetensors"
    os.utime(path, (1, path.stat().st_ctime + 3600))
    clock(100.0, path)
    identity_of_files([path])
    assert not remembered.exists()
    clock(3600 + 10 * FRESH_SECONDS, path)
    identity_of_files([path])
    assert remembered.exists()


@pytest.mark.usefixtures("later")
def test_digests_of_other_checkpoints_stay_and_those_of_removed_files_go(checkpoint, remembered):
    other = copied(checkpoint, "other")
    identity_of(checkpoint)
    identity_of(other)
    known = json.loads(remembered.read_text())
    assert set(known) == {str(path) for folder in (checkpoint, other) for path in folder.iterdir()}
    shutil.rmtree(checkpoint)
    (other / "new.safetensors").write_bytes(b"new")
    identity_of(other)
    assert set(json.loads(remembered.read_text())) == {str(path) for path in other.iterdir()}
    names = {path.name for path in remembered.parent.iterdir()}
    assert names == {remembered.name, f"{remembered.name}.lock"}, "no file is left aside"


NO_ENTRIES = [b"", b"{", b"\xff\xfe", b"[]", b"null", b'"text"', b"7", b"{}"]
WRONG_ENTRIES = [None, 7, "text", [], {}, [1], [1, 2, 3, "digest"], ["a", "b", "c", "digest"], [[], {}, None, "digest"]]


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("content", [*NO_ENTRIES, *WRONG_ENTRIES], ids=repr)
def test_what_is_damaged_is_not_used_and_is_written_anew(checkpoint, remembered, content):
    before = identity_of(checkpoint)
    right = json.loads(remembered.read_text())
    if not isinstance(content, bytes):
        content = json.dumps(dict.fromkeys(right, content)).encode()
    remembered.write_bytes(content)
    assert identity_of(checkpoint) == before
    assert json.loads(remembered.read_text()) == right


@pytest.mark.usefixtures("later")
def test_an_entry_without_its_digest_is_not_used(checkpoint, remembered):
    before = identity_of(checkpoint)
    known = json.loads(remembered.read_text())
    remembered.write_text(json.dumps({path: entry[:-1] for path, entry in known.items()}))
    assert identity_of(checkpoint) == before


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("obstacle", ["cache", "cache/lmc", "cache/lmc/checkpoints.json/folder"])
def test_where_nothing_can_be_written_files_are_read_each_time(checkpoint, tmp_path, obstacle):
    """A file where a folder has to be, and the other way round: root may write to a read-only folder."""
    before = identity_of(checkpoint)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / obstacle).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / obstacle).write_text("in the way")
    assert identity_of(checkpoint) == before
    flip(checkpoint / "model-1.safetensors")
    assert identity_of(checkpoint) != before


# -- parameters ----------------------------------------------------------------------------------------------------


def identity_in_memory(config=CONFIG, also=(), **parameters):
    return identity_of_parameters(config, parameters.items(), also)


WEIGHT = torch.arange(6, dtype=torch.float16).view(2, 3)


def test_parameters_with_the_same_bytes_have_the_same_identity():
    """However they lie in memory, and whether they are trained or not."""
    before = identity_in_memory(w=WEIGHT)
    assert identity_in_memory(w=WEIGHT.clone()) == before
    assert identity_in_memory(w=WEIGHT.t().contiguous().t()) == before
    assert identity_in_memory(w=torch.nn.Parameter(WEIGHT.clone())) == before


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("bit", [0, 15])
def test_one_bit_of_a_parameter_makes_another_identity(at, bit):
    """Also the sign of a zero, which compares equal."""
    other = WEIGHT.clone()
    other.view(torch.int16).view(-1)[at] ^= torch.tensor(1 << bit).to(torch.int16)
    assert identity_in_memory(w=other) != identity_in_memory(w=WEIGHT)


def test_the_bytes_count_and_not_the_numbers_that_they_mean():
    one = torch.ones(1, dtype=torch.float64)
    assert identity_in_memory(w=torch.nextafter(one, 2 * one)) != identity_in_memory(w=one)
    first, second = (torch.tensor([bits], dtype=torch.int16).view(torch.float16) for bits in (0x7E00, 0x7E01))
    assert first.isnan()
    assert second.isnan()
    assert identity_in_memory(w=first) != identity_in_memory(w=second)


@pytest.mark.parametrize(
    "other",
    [{"v": WEIGHT}, {"w": WEIGHT.view(torch.bfloat16)}, {"w": WEIGHT.view(3, 2)}, {"w": WEIGHT.view(torch.uint8)}, {}],
    ids=["name", "dtype", "shape", "width", "none"],
)
def test_name_dtype_and_shape_of_a_parameter_count(other):
    """The bytes are the same."""
    assert identity_in_memory(**other) != identity_in_memory(w=WEIGHT)


def test_every_parameter_counts_and_has_its_own_name():
    one, other = WEIGHT, WEIGHT + 1
    assert len({identity_in_memory(a=a, b=b) for a in (one, other) for b in (one, other)}) == 4


@pytest.mark.parametrize("weight", [torch.zeros(()), torch.zeros(0), torch.zeros(2, 0, dtype=torch.bfloat16)])
def test_scalars_and_empty_parameters_are_parameters(weight):
    assert identity_in_memory(w=weight) != identity_in_memory()


def test_the_config_and_the_loader_s_options_count_and_what_is_no_kv_does_not():
    before = identity_in_memory(w=WEIGHT)
    assert identity_in_memory({**CONFIG, "hidden_size": 65}, w=WEIGHT) != before
    assert identity_in_memory(CONFIG, ["fp8"], w=WEIGHT) != before
    assert identity_in_memory({**CONFIG, "dtype": torch.float16, "_name_or_path": "elsewhere"}, w=WEIGHT) == before


@pytest.mark.parametrize("name", ["_k_scale", "_v_scale"])
def test_the_scales_of_a_quantised_cache_count(name):
    """vLLM keeps them as buffers. The same numbers of 8 bits are other keys with another scale."""

    def digest(scale: float, buffer: str) -> str:
        model = torch.nn.ModuleDict({"attn": torch.nn.Linear(2, 2)})
        torch.nn.init.ones_(model["attn"].weight)
        torch.nn.init.zeros_(model["attn"].bias)
        model["attn"].register_buffer(buffer, torch.tensor(scale))
        return weights_in_memory(SimpleNamespace(load_config=SimpleNamespace(load_format="dummy")), model)

    assert digest(0.5, name) == digest(0.5, name) != digest(0.25, name)
    assert digest(0.5, "cos_sin_cache") == digest(0.25, "cos_sin_cache")


# -- RoPE ----------------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "other",
    [
        dict(reversed(YARN.items())),
        {**YARN, "factor": 4, "rope_theta": 10_000, "original_max_position_embeddings": 4096.0},
        {**YARN, "beta_fast": None},
        {"type": "yarn", **{name: value for name, value in YARN.items() if name != "rope_type"}},
        {**YARN, "type": "yarn"},
        {**YARN, "rope_type": None, "type": "yarn"},
    ],
)
def test_every_spelling_of_the_same_rope_has_one_name(other):
    assert rope_name(other) == rope_name(YARN)


def test_what_is_not_said_is_the_default():
    assert rope_name(None) == rope_name({}) == rope_name({"rope_type": "default"}) == rope_name({"type": "default"})


@pytest.mark.parametrize(
    "other", [{**YARN, "rope_type": "linear"}, {**YARN, "factor": 4.5}, {**YARN, "beta_fast": 32}, {}, None]
)
def test_another_rope_has_another_name(other):
    assert rope_name(other) != rope_name(YARN)


def test_naming_a_rope_does_not_change_the_model_s_config():
    given = {"type": "yarn", "factor": 4}
    rope_name(given)
    assert given == {"type": "yarn", "factor": 4}


# -- adapters ------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_an_adapter_keeps_its_stamp_as_long_as_nothing_changes(adapter):
    assert adapter_stamp(str(adapter)) == adapter_stamp(str(adapter))
    assert len(adapter_stamp(str(adapter))) == 32


def test_a_file_of_an_adapter_that_changes_makes_another_stamp(adapter):
    path, stamps = adapter / "adapter_model.safetensors", [adapter_stamp(str(adapter))]
    for content in (b"Weights", b"more weights"):  # The first has the size and the time of the old one.
        status = path.stat()
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        stamps.append(adapter_stamp(str(adapter)))
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    stamps.append(adapter_stamp(str(adapter)))
    path.rename(adapter / "adapter_model.bin")
    stamps.append(adapter_stamp(str(adapter)))
    (adapter / "adapter_config.json").unlink()
    stamps.append(adapter_stamp(str(adapter)))
    assert len(set(stamps)) == 6


def test_an_adapter_that_has_not_changed_is_not_read_again(adapter, monkeypatch):
    """Some versions of vLLM say for each request that the adapter may have changed."""
    stamp = adapter_stamp(str(adapter))
    with monkeypatch.context() as patch:
        patch.setattr("lmc.engine.identity.identity_of_files", None)
        assert adapter_stamp(str(adapter)) == stamp
    (adapter / "adapter_model.safetensors").write_bytes(b"Weights")
    assert adapter_stamp(str(adapter)) != stamp


def test_times_and_files_that_vllm_does_not_load_leave_the_stamp_of_an_adapter(adapter):
    stamp = adapter_stamp(str(adapter))
    os.utime(adapter / "adapter_model.safetensors", (0, 0))
    (adapter / "optimizer.pt").write_bytes(b"state")
    assert adapter_stamp(str(adapter)) == stamp


def test_two_adapters_with_equal_files_have_two_stamps(adapter):
    """An engine's block hashes name the path."""
    assert adapter_stamp(shutil.copytree(adapter, f"{adapter}-2")) != adapter_stamp(str(adapter))


def test_an_adapter_that_is_not_on_this_host_has_a_new_stamp_each_time(adapter):
    for path in ("somebody/adapter", str(adapter / "adapter_config.json")):
        assert adapter_stamp(path) != adapter_stamp(path)
        assert len(adapter_stamp(path)) == 32


def test_an_adapter_is_not_identified_by_its_files(tmp_path):
    """The weights of its base, and how much the adapter adds to them, stand elsewhere."""
    for name in ("adapter_model.safetensors", "model.safetensors", "config.json"):
        (tmp_path / name).write_text("{}")
    assert checkpoint_files(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 16}')
    assert checkpoint_files(tmp_path) == []
