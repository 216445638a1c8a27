"""`lmc demo`: real questions over real documents, answered by a pretrained model in four ways side by side.

`command` is the command line, `questions` builds the prompts, `run` asks them, `outcome` is what was found, `page`
draws the HTML page, and `pretrained` has the model. With `--small`, a small model that the wheel ships is asked about
documents made for it. `random_model` makes models with random weights, which the benchmarks use too.
"""

from pathlib import Path

SHIPPED = Path(__file__).parent / "small_model"  # holds model/, documents/ and questions.json
REAL = Path(__file__).parent / "real"  # holds documents/ and questions.json for a pretrained model
