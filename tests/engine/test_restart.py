"""What an engine has stored, the next one on the same disk finds: pages and documents, of these weights, unharmed or
not at all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import transformers
from amount import mostly_long
from lab import DOCUMENTS, FAMILIES, PLAIN, PROMPT, SIZES, Lab, agree, answer, engine, facts
from stepping import only_on_disk, poison
from tier_wrappers import Faulty

from lmc.connectors.vllm.worker import worker
from lmc.connectors.vllm.worker.rank_slab import RankSlab


@contextmanager
def running(model: Path, disk: Path) -> Iterator[Lab]:
    mapped, patch = [], pytest.MonkeyPatch()
    patch.setattr(worker, "RankSlab", lambda *given: mapped.append(given) or RankSlab(*given))
    with engine(model, {"local_disk": str(disk)}) as lab:
        patch.undo()
        assert mapped == [], "a slab is page-locked when it is mapped, and graphs were captured until now"
        poison()
        yield lab


@pytest.fixture(scope="module", params=mostly_long(["llama", "gemma3mixed"], "llama"))
def before(request, models, tmp_path_factory):
    """A disk that an earlier engine has left, and that engine's answers without any cache."""
    disk = tmp_path_factory.mktemp("disk")
    with running(models(request.param), disk) as lab:
        wanted = {len(tokens): lab.vanilla(tokens) for tokens in (PROMPT.tokens, PLAIN)}
        lab.learn(DOCUMENTS)
        lab.ask(PLAIN)
        lab.settle()  # the last blocks are saved in the step behind the answer
    return request.param, disk, wanted


@pytest.fixture(scope="module")
def restarted(before, models):
    family, disk, wanted = before
    with running(models(family), disk) as lab:
        lab.disk, lab.wanted = disk, wanted
        yield lab


@pytest.fixture
def lab(restarted):
    """The second engine, which has read nothing yet: tests run in this order."""
    tiers = restarted.tiers
    honest = tiers[0]
    yield restarted
    tiers[0] = honest
    restarted.check()


def right(lab, out, tokens) -> bool:
    return agree(out, lab.wanted[len(tokens)])


def test_pages_of_before_are_loaded_and_only_the_tail_is_computed(lab):
    out = lab.ask(PLAIN)
    assert facts(out) == {"exact_tokens": 672, "tokens_from": {"disk": 672}}
    assert out.num_cached_tokens == 672
    assert right(lab, out, PLAIN)


def test_documents_learned_before_are_blended(lab):
    out = lab.ask(PROMPT.tokens, PROMPT.blend(ratio=1.0))
    assert facts(out)["reused_tokens"] == sum(map(len, DOCUMENTS))
    assert facts(out)["tokens_from"] == {"disk": sum(map(len, DOCUMENTS))}
    assert right(lab, out, PROMPT.tokens)


@pytest.mark.parametrize("when", ["at rest", "between lookup and load", "between two layers"])
@pytest.mark.parametrize("what", ["pages", "documents"])
def test_a_record_that_has_changed_on_disk_is_not_used(lab, when, what):
    """The changed bytes are noticed, the engine computes the tokens, and a correct record replaces the changed one."""
    tokens, lmc = (PLAIN, None) if what == "pages" else (PROMPT.tokens, PROMPT.blend(ratio=1.0))
    lab.learn(DOCUMENTS)
    lab.ask(PLAIN)
    lab.forget_prefixes()
    only_on_disk(lab)
    poison()
    tiers, flipped = lab.tiers, []

    def flip(verb, key):
        if verb == {"between lookup and load": "open", "between two layers": "read"}[when] and key not in flipped:
            flipped.append(key)
            damage(next(lab.disk.rglob(f"records/*/{key.hex()}*")))

    if when == "at rest":
        for path in sorted(lab.disk.rglob("records/*/*")):
            damage(path)
    else:
        tiers[0] = Faulty(tiers[0], flip)
    out = lab.ask(tokens, lmc)
    assert right(lab, out, tokens)
    assert not {"exact_tokens", "reused_tokens"} & set(facts(out))
    lab.forget_prefixes()
    assert right(lab, lab.ask(tokens, lmc), tokens)


@pytest.mark.long
def test_other_weights_on_the_same_disk_find_nothing(before, tmp_path, restarted):
    """The last test of this module: it takes the disk from the engine above."""
    restarted.llm.llm_engine.engine_core.shutdown()
    _, disk, wanted = before
    with running(other_weights(tmp_path), disk) as lab:
        outs = [lab.ask(PLAIN), lab.ask(PROMPT.tokens, PROMPT.blend(ratio=1.0))]
        assert [facts(out) for out in outs] == [{}, {"unknown_documents": 4}]
        plain = [lab.vanilla(PLAIN), lab.vanilla(PROMPT.tokens)]
        assert [answer(a) == answer(b) for a, b in zip(outs, plain, strict=True)] == [True, True]
        assert answer(plain[0]) != answer(wanted[700]), "they are other weights"


def other_weights(folder: Path) -> Path:
    import torch

    kind, options = FAMILIES["llama"]
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(kind(**{**SIZES, **options})).save_pretrained(folder / "other")
    return folder / "other"


def damage(path: Path) -> None:
    """Change bytes of every part; the file's size and its header stay. In few calls: the engine spins, and holds
    Python's lock.
    """
    changed = bytearray(path.read_bytes())
    changed[8192::4096] = b"\xa5" * len(changed[8192::4096])
    with path.open("r+b") as file:
        file.write(changed)
