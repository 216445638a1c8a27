"""An engine that is attached to a cache server, in a process of its own: it answers what standard input asks.

Each line is a list of JSON: tokens, and what is asked of lmc. The answer is a line of JSON. The engine's own prefix
cache is empty for each.
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

from lab import answer, engine, facts


def main() -> None:
    model, server = sys.argv[1:]
    with engine(Path(model), {"server": server}) as lab:
        print("ready", flush=True)  # noqa: T201
        for line in sys.stdin:
            tokens, asked = json.loads(line)
            out = lab.ask(tokens, asked)
            lab.forget_prefixes()
            print(json.dumps({"answer": answer(out), "facts": facts(out)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
