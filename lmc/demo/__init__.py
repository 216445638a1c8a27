"""`lmc demo`: real questions over real documents, answered by a pretrained model in four modes side by side.

`command` is the command line, `questions` builds the prompts, `run` runs them, `outcome` has the results, `page` writes
the HTML page, and `pretrained` provides the model. With `--small`, the demo uses a small model of the wheel, and
documents made for it. `random_model` makes models with random weights, which the benchmarks also use.
"""

from pathlib import Path

SHIPPED = Path(__file__).parent / "small_model"  # holds model/, documents/ and questions.json
REAL = Path(__file__).parent / "real"  # holds documents/ and questions.json for a pretrained model
