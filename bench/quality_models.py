"""Writes the page that compares pretrained models, from what `bench/quality.py` has kept of them.

python bench/quality_models.py      # bench/results/quality_models.html
"""

import json
from pathlib import Path

from common import kept_path
from quality.page import write_models
from quality.rows import MEAN
from quality.ways import default

from lmc.config.settings import Settings
from lmc.demo.pretrained import MODELS

# Results of each model. Those that are not kept yet are left out.
RESULTS_OF = {
    "smollm2": ("quality", "quality_inside", "quality_joined", "quality_python"),
    "gemma3": ("quality_gemma3", "quality_gemma3_python"),
    "qwen2.5-coder": ("quality_qwen2.5-coder", "quality_qwen2.5-coder_python"),
}


def main() -> int:
    by_kind: dict[str, dict[str, dict[str, object]]] = {}
    machines = []
    for key, names in RESULTS_OF.items():
        for path in filter(Path.exists, map(kept_path, names)):
            kept = json.loads(path.read_text(encoding="utf-8"))
            machines.append(kept["machine"])
            for kind, found in kept["groups"].items():
                if not kind.startswith("small ("):  # questions of the small model
                    by_kind.setdefault(kind, {})[MODELS[key].name] = found
    order = sorted(by_kind, key=lambda kind: (not kind.startswith(MEAN), -len(by_kind[kind])))
    page = kept_path("quality_models").with_suffix(".html")
    write_models(
        page, {kind: by_kind[kind] for kind in order}, default(Settings()).name, " / ".join(dict.fromkeys(machines))
    )
    print(f"page: {page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
