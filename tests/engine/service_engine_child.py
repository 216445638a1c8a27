"""An engine that is attached to a cache server, in a process of its own: it answers what standard input asks.

Its arguments are a model, and settings as JSON. Each line is a list of JSON: tokens, what is asked of lmc, how many
tokens are wanted, and whether the engine saves everything before it answers. The answer is a line of JSON. The engine's
own prefix cache is empty for each.
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

from lab import answer, engine, facts


def main() -> None:
    model, settings = sys.argv[1:]
    with engine(Path(model), json.loads(settings)) as lab:
        print("ready", flush=True)  # noqa: T201
        for line in sys.stdin:
            tokens, asked, count, saves = json.loads(line)
            lab.forget_prefixes()
            out = lab.ask(tokens, asked, count)
            if saves:
                lab.settle()
            print(json.dumps({"answer": answer(out), "facts": facts(out)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
