"""The scheduler's side: what each request is promised, what workers are told, what is kept.

Called by the connector with the engine's requests and block pool, of which it uses what any version has: ids, tokens, hashes,
reference counts. Never blocks: a chunk that is still on its way is waited for by being asked again. No vLLM is imported.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lmc.blend.segments import Variants, split
from lmc.config import Settings
from lmc.connectors.vllm.events import Events
from lmc.connectors.vllm.fingerprint import adapter_stamp
from lmc.connectors.vllm.isolation import cached_blocks, salt, salt_of
from lmc.connectors.vllm.keeper import Keeper
from lmc.connectors.vllm.library import Library
from lmc.connectors.vllm.messages import BlendJob, LoadJob, StepPlan, StepReport
from lmc.connectors.vllm.planner import Planner
from lmc.connectors.vllm.requests import Options
from lmc.connectors.vllm.served import Claim, Document, Role, Served
from lmc.errors import ConfigError, InputError
from lmc.keys import check_tokens
from lmc.metrics import flat
from lmc.storage.loads import PinState

log = logging.getLogger(__name__)

Tables = Callable[[str], Sequence[int]]  # the block table of a scheduled request

LEARN_SECONDS = 10.0  # for which an idle engine goes on learning; a shutdown or a pause waits for it


class Scheduler:
    """One engine's requests over one library."""

    def __init__(
        self,
        settings: Settings,
        library: Library,
        pool: Any,
        *,
        variants: Variants | None,
        first_token: int | None,
        blends: bool,
        batch_tokens: int,
        tells: bool = False,
        counts_images: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._library, self._pool = settings, library, pool
        self._variants, self._first_token, self._blends = variants, first_token, blends
        self._clock = clock
        self._planner = Planner(settings, library, clock)
        if blends:
            Options().policy(settings).check_depth(sum(library.stages))
        self.events = Events(library) if tells else None
        self._keeper = Keeper(settings, library, pool, batch_tokens=batch_tokens, events=self.events)
        self._served: dict[str, Served] = {}
        self._jobs: list[LoadJob | BlendJob] = []
        self._told: set[str] = set()
        self._introduced = False
        self._ran = clock()  # when the engine last computed something
        self._adapters: dict[tuple[int, str], bytes] = {}
        # The engine's ids of images are numbers that begin anew in every process: hashes of one are not those of another.
        self._counts_images, self._process = counts_images, os.urandom(32)
        self.counts: Counter[str] = Counter()

    # -- requests come and go ----------------------------------------------------------------------------------------

    def arrive(self, request: Any) -> None:
        """Look at a new request; start to fetch what lies on slower tiers."""
        served = self._classify(request)
        if request.lora_request is not None:
            served.stamp = self._adapter(request.lora_request)
        if request.mm_features and self._counts_images:
            served.stamp += self._process
        self._served[served.id] = served
        self.counts["requests"] += 1
        if request.skip_reading_prefix_cache:
            return
        if served.role is Role.BLEND:
            self._find_own_blend(served)
        self._planner.prefetch(served, cached_blocks(self._pool, request.block_hashes) * self._library.block_size)
        if served.skipped:
            self.counts["loads_skipped"] += 1

    def claim(self, request: Any, local: int) -> int | None:
        """How many tokens behind `local` will be loaded; None to be asked again. The same answer until something changes."""
        served = self._served.get(request.request_id)
        if served is None or served.given_up or request.skip_reading_prefix_cache:
            return 0
        if served.asked is None:
            served.wait_from(self._clock())
        elif served.claim is None and self._planner.waits(served):
            return None
        if served.claim is None or served.claim.local != local:
            served.claim = self._planner.plan(served, local)
        return None if served.claim is None else served.claim.stop - local

    def allocated(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        """The engine has taken a claim of `tokens`, and these are the request's blocks."""
        served = self._served.get(request.request_id)
        if served is None or not tokens:
            return
        claim = served.claim
        assert claim is not None
        assert claim.stop - claim.local == tokens, "the engine loads another number of tokens than it was promised"
        served.claim, served.loading = None, True
        served.wait_from(self._clock())
        served.sources = claim.sources
        served.exact_tokens += max(0, claim.exact - claim.local)
        copies = self._planner.copies(served, claim, blocks)
        ready = all(pin.state() is PinState.READY for pin in served.pins.values())
        if claim.parts:
            self._isolate(served, claim)
            self._jobs.append(self._blend_job(served, claim, blocks, copies=copies, ready=ready))
            self.counts["blends"] += 1
        else:
            self._jobs.append(LoadJob(request=served.id, copies=copies, ready=ready))
            self.counts["loads"] += 1
        for place, count in served.sources.items():
            self.counts[f"tokens_from_{place}"] += count

    def sources(self, request: Any, tokens: int) -> dict[str, int]:
        """Where `tokens` loaded tokens come from, by place; what is computed on the way is "computed"."""
        served = self._served.get(request.request_id)
        found = dict(served.sources) if served else {}
        found["computed"] = tokens - sum(found.values())
        return {place: count for place, count in found.items() if count > 0}

    def finished(self, request: Any, blocks: Sequence[int]) -> dict[str, object] | None:
        """A request has ended: its last blocks are kept, its unknown documents will be learned. Returns facts for the response."""
        served = self._served.get(request.request_id)
        if served is None:
            return None
        if not served.loading:  # else a worker may be reading; it is told, and reports
            self._keeper.save_tail(served, blocks)
            self._forget(served)
        # Not of those that never ran: who is asleep, or being given new weights, has nothing to compute with.
        learns = self._settings.blend_learn and request.num_computed_tokens
        for span in served.unknown if learns else ():
            self._keeper.queue(served.namespace, tuple(request.prompt_token_ids[span.start : span.stop]))
        return served.facts()

    # -- a step ------------------------------------------------------------------------------------------------------

    def plan(self, scheduled: dict[str, int], tables: Tables) -> StepPlan:
        """What workers have to do in this step."""
        if scheduled:
            self._ran = self._clock()
        for request, tokens in scheduled.items():
            served = self._served.get(request)
            if served is not None:
                self._release(served)  # a claim that the engine did not take
                computed = served.request.num_computed_tokens + tokens
                self._keeper.save_due(served, computed, lambda request=request: tables(request))  # type: ignore[misc]
        late = self._give_up_on_late_loads()
        self._introduced = True
        learn = self._keeper.learn_next() if self._runs else None
        plan = StepPlan(
            slab=self._library.slab_at,
            stages=self._library.stages,
            scheduled=sum(scheduled.values()),
            loads=self._jobs,
            late=late,
            saves=self._keeper.take_saves(),
            learn=[learn] if learn else [],
        )
        self._jobs = []
        blending = any(served.loading and served.approximate is not None for served in self._served.values())
        self._planner.watch(self._served, scheduled, alone=not (blending or plan.learn))
        return plan

    def reset(self) -> None:
        """Everything that was computed until now is of no use any more: the weights have changed, or somebody wants to measure."""
        self._library.begin_anew()
        self._library.forget_all(wait=False)
        self._keeper.forget()
        for served in self._served.values():
            served.approximate = 0  # what it still computes lies on top of old KV
            # Its documents have the keys of the old weights, under which others may have them, or will.
            served.role, served.documents, served.unknown = Role.EXACT, [], []
            if not served.loading:
                self._release(served)

    def reported(self, report: StepReport, received: set[str]) -> None:
        """What workers have done; `received` are requests whose load is over on all ranks."""
        for request in report.lost & self._served.keys():
            served = self._served[request]
            served.given_up, served.exact_tokens = True, 0
            served.sources.clear()
            self.counts["failed_loads"] += 1
        for request, facts in report.blended.items():
            self.counts["token_layers"] += int(facts["token_layers"])  # type: ignore[call-overload]
            if request in self._served:
                self._served[request].blended = facts
        for request in received & self._served.keys():
            served = self._served[request]
            served.loading = False
            if served.request.is_finished():
                self._forget(served)
            else:
                self._release(served)
        self._library.jobs.report(report.done, report.failed)

    @property
    def busy(self) -> bool:
        """Whether the engine has to go on stepping for us: also once at the start, so that workers open the slab before a request comes."""
        return not self._introduced or self._keeper.saving or (self._runs and self._keeper.learning)

    @property
    def _runs(self) -> bool:
        """Whether the engine has computed something of late: else it may be paused, or asleep without its weights."""
        return self._clock() - self._ran < LEARN_SECONDS

    def numbers(self) -> dict[str, float]:
        """Counts since start and gauges, by the keys of `lmc.metrics`."""
        stored = self._library.jobs.stored
        return {
            **self.counts,
            **flat(self._library.store.stats()),
            "stored_chunks": stored["chunks"],
            "stored_tokens": stored["tokens"],
            "layers": sum(self._library.stages),
        }

    @property
    def library(self) -> Library:
        """Where everything is."""
        return self._library

    # -- what a request is -------------------------------------------------------------------------------------------

    def _classify(self, request: Any) -> Served:
        given = request.kv_transfer_params
        try:
            options = Options.read(given.get("lmc") if isinstance(given, dict) else None, request.num_prompt_tokens)
            served = Served(request=request, role=Role.EXACT, policy=options.policy(self._settings))
            self._find_role(served, options)
        except (InputError, ConfigError) as error:
            self._refuse("wishes", f"a request is served without blending: {error}")
            return Served(request=request, role=Role.EXACT, note=str(error))
        return served

    def _find_role(self, served: Served, options: Options) -> None:
        request = served.request
        asked = options.learn or (options.blend and options.documents is not None)
        if not asked and not (self._blends and options.blend and self._variants):
            return
        if request.prompt_token_ids is None:
            return
        assert served.policy is not None
        served.policy.check_depth(sum(self._library.stages))
        check_tokens(request.prompt_token_ids)
        served.namespace = self._library.document_namespace(request.cache_salt or "")
        if not options.learn:
            self._find_documents(served, options)
        if asked or served.documents:
            served.note = self._why_not(request, options.learn)
            if not served.note:
                served.role = Role.LEARN if options.learn else Role.BLEND

    def _why_not(self, request: Any, learn: bool) -> str:
        """Why a request that would be blended or learned is served exactly instead; empty if nothing is in the way."""
        for there, why in (
            (not self._blends, "blending is off: the log says why at the start of the engine"),
            (request.lora_request is not None, "requests with LoRA are not blended"),
            (bool(request.mm_features), "requests with multimodal input are not blended"),
            (request.prompt_embeds is not None, "requests with prompt embeddings are not blended"),
            (
                learn and request.prompt_token_ids[0] == self._first_token,
                "a document to learn must not begin with the BOS token: inside a prompt it has none (add_special_tokens: false)",
            ),
        ):
            if there:
                self._refuse(why, f"{why}; served exactly")
                return why
        return ""

    def _refuse(self, about: str, text: str) -> None:
        self.counts["refused"] += 1
        if about not in self._told:
            self._told.add(about)
            log.warning("%s (said once, counted as lmc:refused)", text)

    def _find_documents(self, served: Served, options: Options) -> None:
        prompt = served.request.prompt_token_ids
        if options.documents is not None:
            spans = options.documents
            served.question = spans[-1].stop if spans else 0
        else:
            assert self._variants is not None
            segments = split(prompt, self._variants)
            spans, served.question = segments.documents, segments.question.start
        served.question = min(served.question, len(prompt) - 1)  # whoever asks nothing lets the last token ask
        for span in spans:
            keys = self._library.document_keys(served.namespace, prompt[span.start : span.stop])
            served.documents.append(Document(span=span, keys=keys))

    def _adapter(self, lora: Any) -> bytes:
        """What an adapter was when the engine loaded it, as far as can be known: when it was first asked for."""
        named = (lora.lora_int_id, lora.lora_path)
        if named not in self._adapters or lora.load_inplace:
            self._adapters[named] = adapter_stamp(lora.lora_path)
        return self._adapters[named]

    # -- isolation ---------------------------------------------------------------------------------------------------

    def _find_own_blend(self, served: Served) -> None:
        """If the engine still has the blocks of the very same blend, let it find them."""
        request, exact = served.request, list(served.request.block_hashes)
        cached = cached_blocks(self._pool, exact)
        first, reused = self._planner.prospect(served, cached * self._library.block_size)
        block = first // self._library.block_size
        if not reused or block >= len(exact):
            return
        assert served.policy is not None
        salt(request, block, salt_of(request.prompt_token_ids, reused, served.policy))
        if cached_blocks(self._pool, request.block_hashes) > max(block, cached):
            served.approximate, served.salted = first, block
        else:
            request.block_hashes[:] = exact

    def _isolate(self, served: Served, claim: Claim) -> None:
        first = claim.parts[0].at
        served.approximate = first if served.approximate is None else min(first, served.approximate)
        block = first // self._library.block_size
        # A salt of its arrival may begin too late: the exact blocks before it can have gone since.
        if served.salted is None or block < served.salted:
            assert served.policy is not None
            secret = salt_of(served.request.prompt_token_ids, claim.reused, served.policy)
            salt(served.request, block, secret)
            served.salted = block

    # -- inside ------------------------------------------------------------------------------------------------------

    def _blend_job(self, served: Served, claim: Claim, blocks: Sequence[int], *, copies: Any, ready: bool) -> BlendJob:
        assert served.policy is not None
        return BlendJob(
            request=served.id,
            tokens=tuple(served.request.prompt_token_ids[: claim.stop]),
            blocks=tuple(blocks[: -(-claim.stop // self._library.block_size)]),
            start=claim.local,
            exact=claim.exact,
            question=claim.question,
            copies=copies,
            documents=tuple(claim.parts),
            ready=ready,
            policy=served.policy,
        )

    def _give_up_on_late_loads(self) -> list[str]:
        """Requests to whom a slow tier still owes parts: workers end their loads, and the engine computes.

        Labels alone would not tell: a part that newer requests still wait for is not lost.
        """
        given_up = []
        for served in self._served.values():
            if served.loading and self._planner.is_late(served):
                late = [key for key, pin in served.pins.items() if pin.state() is PinState.COMING]
                self._library.let_go([served.pins.pop(key) for key in late])
                given_up += [served.id] if late else []
        return given_up

    def _release(self, served: Served) -> None:
        self._library.let_go(list(served.pins.values()))
        served.pins.clear()
        served.claim = served.asked = None

    def _forget(self, served: Served) -> None:
        self._release(served)
        del self._served[served.id]
