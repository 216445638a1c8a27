"""`lmc demo`: questions over documents, answered in four ways side by side, with a small model that the wheel ships.

`command` is the command line, `run` asks the questions and makes the table, `questions` builds the prompts, `page`
draws the HTML page, and `random_model` makes models with random weights, which the benchmarks use too.
"""

from pathlib import Path

SHIPPED = Path(__file__).parent / "small_model"  # holds model/, documents/ and questions.json
