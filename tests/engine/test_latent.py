"""MLA (DeepSeek): pages without heads are offloaded like any others."""

from lab import answer, distance, engine, facts, words
from stepping import poison

PLAIN = words(700, 9)


def test_latent_pages_are_loaded_exactly(models):
    """MLA: one page for all heads. Its kernel rounds otherwise behind a prefix than in a whole prompt, as far as the
    engine's own hits.
    """
    # The other kernel, for CPUs with AMX, does not take float32.
    with engine(models("deepseek"), attention_backend="CPU_MLA") as lab:
        wanted = lab.vanilla(PLAIN)
        lab.ask(PLAIN)
        kept = lab.ask(PLAIN, {"blend": False})
        lab.forget_prefixes()
        poison()
        found = lab.ask(PLAIN)
        size = lab.scheduler.block_size
        assert facts(found)["exact_tokens"] == 700 // size * size
        assert answer(found) == answer(kept) == answer(wanted)
        assert distance(found, wanted) <= 1e-3
        assert distance(kept, wanted) <= 1e-3
        lab.check()
