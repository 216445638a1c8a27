"""An engine in processes of its own, as servers have it: what it answers to the same questions cold, reloaded and
blended, as JSON.

Run by `test_parallel.py` with a model and the engine's options; the last line it prints is the result.
"""

import json
import sys
import time
from pathlib import Path

from lab import DOCUMENTS, PLAIN, PROMPT, agree, facts, launch

SECONDS = 60.0
LONGEST = max(map(len, DOCUMENTS))


class Child:
    """Asks an engine that cannot be looked into."""

    def __init__(self, llm) -> None:
        self.llm = llm

    def ask(self, tokens, lmc=None, count=8, **more):
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"lmc": lmc}} if lmc is not None else None
        parameters = SamplingParams(
            temperature=0, detokenize=False, ignore_eos=True, logprobs=1, max_tokens=count, extra_args=extra, **more
        )
        return self.llm.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)[0]

    def forget(self, *, chunks: bool = False) -> None:
        """Empty the engine's cache, and ours; refused while blocks are held by saves that are under way."""
        end = time.monotonic() + SECONDS
        while not self.llm.reset_prefix_cache(reset_connector=chunks):
            assert time.monotonic() < end, "blocks are held for ever"
            time.sleep(0.01)

    def learned(self) -> None:
        """Wait until documents that were met are known."""
        end = time.monotonic() + SECONDS
        while "unknown_documents" in facts(self.ask(PROMPT.tokens, PROMPT.blend(strategy="none"), 1)):
            assert time.monotonic() < end, "the documents are never learned"
            time.sleep(0.01)

    def same(self, found, wanted) -> bool:
        return agree(found, wanted)


def exact(child: Child) -> dict[str, object]:
    """Name of a promise about exact prefixes -> what was seen."""
    plain = child.ask(PLAIN)
    child.forget()
    found = child.ask(PLAIN)
    return {"pages": facts(found), "pages are exact": child.same(found, plain)}


def blended(child: Child) -> dict[str, object]:
    """Name of a promise about blends -> what was seen."""
    seen: dict[str, object] = {}
    wanted = child.ask(PROMPT.tokens, {"blend": False})
    child.forget(chunks=True)
    found = child.ask(PROMPT.tokens, PROMPT.blend())
    seen["unknown"], seen["unknown documents do no harm"] = facts(found), child.same(found, wanted)
    child.learned()
    child.forget(chunks=True)
    for document in DOCUMENTS:
        seen["learned"] = facts(child.ask(document, {"learn": True}, 1))
    for strategy in ("query", "union", "deviation", "none"):
        child.forget()
        found = child.ask(PROMPT.tokens, PROMPT.blend(strategy=strategy, ratio=1.0))
        seen[f"{strategy} reused"] = facts(found).get("reused_tokens", 0)
        seen[f"{strategy} is exact"] = child.same(found, wanted)
    child.forget()
    seen["plain after blends"] = child.same(child.ask(PROMPT.tokens), wanted)
    child.forget()
    return seen


def without_memory(worker) -> None:
    """In each rank: the second one has no memory for a long blend when it is asked for the third time."""
    import torch

    from lmc.connectors.vllm.worker import worker as connector

    make_room, empty = connector.make_room, torch.empty

    def scarce(size, device, what, kept=0):
        def none_is_left(*shape, **options):
            torch.empty = empty
            raise torch.OutOfMemoryError("CUDA out of memory")

        if what.startswith("a blend") and int(what.split()[3]) > LONGEST:  # Documents that are learned are blends, too.
            worker.asked += 1
            if worker.asked > 2 and worker.rank == 1:
                torch.empty = none_is_left
        make_room(size, device, what, kept)

    worker.asked, connector.make_room = 0, scarce


def refused(child: Child) -> dict[str, object]:
    """What is seen when one of the ranks has no memory in the middle of a blend, and then before another one."""
    wanted = child.ask(PROMPT.tokens, {"blend": False})
    child.llm.collective_rpc(without_memory)
    found = []
    for _ in range(2):
        child.forget(chunks=True)
        for document in DOCUMENTS:
            child.ask(document, {"learn": True}, 1)
        child.forget()
        found.append(child.ask(PROMPT.tokens, PROMPT.blend(strategy="union", ratio=1.0)))
    return {
        "refused": [facts(one).get("reused_tokens", 0) for one in found],
        "refused blends are computed": all(child.same(one, wanted) for one in found),
        "asked for memory": child.llm.collective_rpc(lambda worker: worker.asked),
    }


if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    llm = launch(Path(sys.argv[1]), **options)
    result = exact(Child(llm))
    if "pipeline_parallel_size" not in options:
        result |= blended(Child(llm))
    if "tensor_parallel_size" in options:
        result |= refused(Child(llm))
    llm.llm_engine.engine_core.shutdown()
    sys.stdout.write(json.dumps(result) + "\n")
