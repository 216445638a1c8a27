"""`lmc size`: computes the size of the KV of a model and of documents, and how much of it fits into each tier."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from lmc.commands.learn.command import SOURCE_HELP, IdField, Patterns, Split, TextField
from lmc.errors import needs_transformers
from lmc.terminal import AsJson, console, print_json, printable

if TYPE_CHECKING:
    from lmc.documents.sources import Corpus

MANY_DOCUMENTS = 10_000  # number of documents for which the required size is also printed
MILLION = 1_000_000  # number of documents for which the size of the index is also printed
LABEL_BYTES = 4  # usual bytes of one token in the label of a document's last record


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The sizes of a model's KV and of documents. Sizes are in bytes unless stated otherwise."""

    token: int
    slot: int  # memory of one chunk
    chunk_tokens: int
    memory: float
    disk: float  # 0 without a disk tier
    documents: int = 0
    tokens: int = 0  # number of tokens of all documents
    shortest: int = 0  # tokens of the shortest document
    longest: int = 0  # tokens of the longest document
    on_disk: int = 0  # bytes of all documents on disk
    slots: int = 0  # number of memory slots for all documents
    index: int = 0  # memory of an engine that knows all documents
    max_index: float = 0.0  # maximum memory for known documents
    disk_index: int = 0  # bytes of the disk tier's index for all documents
    unblended: str = ""  # why vLLM with lmc does not blend documents of this model; empty if it does
    skipped: dict[str, str] = field(default_factory=dict)  # document -> why it cannot be learned

    @property
    def fit_in_memory(self) -> int:
        """Number of documents of the same mean size that fit into memory."""
        return int(self.memory // self.slot * self.documents / self.slots)

    @property
    def fit_on_disk(self) -> int:
        """Number of documents of the same mean size that fit on disk."""
        return int(self.disk * self.documents / self.on_disk)

    @property
    def known(self) -> int:
        """Number of documents of the same mean size that an engine knows."""
        return int(self.max_index * self.documents / self.index)


def size(
    model: Annotated[str, typer.Argument(help="directory or hub id of a model")],
    documents: Annotated[str | None, typer.Option(help=SOURCE_HELP)] = None,
    patterns: Patterns = None,
    id_field: IdField = "id",
    text_field: TextField = "text",
    split: Split = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="dtype of the KV: bfloat16, float16, float32, fp8 (fp8_e4m3), fp8_e5m2, or auto, the default: the "
            "model's dtype, and bfloat16 for float32, as vLLM serves such models"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the size of the KV of a model and of documents, and how many documents fit into memory and disk.

    It also says whether lmc can blend documents for this model, and which documents it could not learn. Documents are
    read as by lmc learn.

    Only the model's configuration and tokenizer are read. Memory, disk and chunk_size are those of the settings.
    """
    from lmc.config.settings import Settings
    from lmc.documents.sources import Corpus, read_documents

    corpus = read_documents(documents, id_field, text_field, patterns or ()) if documents else Corpus()
    try:
        from lmc.connectors.transformers.hf import model_facts, tokenizer_of
    except ImportError as error:
        raise needs_transformers("lmc size", error) from error
    from lmc.connectors.vllm.model_kinds import TESTED
    from lmc.documents.known import document_bytes, known_bytes
    from lmc.keys import chunk_bounds
    from lmc.shapes import GIB
    from lmc.storage.chunk_layout import ChunkLayout
    from lmc.storage.tiers.disk.index import index_bytes

    settings, facts = Settings.load(), model_facts(model, dtype)
    narrowed = dtype in (None, "auto") and facts.shape.dtype.itemsize == 4  # float32
    facts = model_facts(model, "bfloat16") if narrowed else facts
    shape, chunk_size = facts.shape, settings.chunk_size
    lengths = _lengths(corpus, tokenizer_of(model), facts.positions, split) if corpus.documents else []
    chunks = [len(chunk_bounds(length, chunk_size)) for length in lengths]
    sizes = Size(
        token=shape.token_bytes * shape.layers,
        slot=ChunkLayout.of(shape, chunk_size).slot_bytes,
        chunk_tokens=chunk_size,
        memory=settings.max_local_cpu_size * GIB,
        disk=settings.max_local_disk_size * GIB if settings.local_disk is not None else 0.0,
        documents=len(lengths),
        tokens=sum(lengths),
        shortest=min(lengths, default=0),
        longest=max(lengths, default=0),
        on_disk=sum(document_bytes(length, chunk_size, shape, shape.layers) for length in lengths),
        unblended=facts.unblended,
        skipped=corpus.skipped,
        slots=sum(chunks),
        index=sum(map(known_bytes, lengths, chunks)),
        max_index=settings.max_document_index_size * GIB,
        disk_index=index_bytes(0) * (sum(chunks) - len(lengths)) + sum(index_bytes(LABEL_BYTES * n) for n in lengths),
    )
    if as_json:
        fit = {"fit_in_memory": sizes.fit_in_memory, "fit_on_disk": sizes.fit_on_disk} if lengths else {}
        print_json(asdict(sizes) | fit)
        return
    layers = f"{shape.layers} layers {facts.kept}, {str(shape.dtype).removeprefix('torch.')}"
    why = "; the model has float32: use --dtype float32 if vLLM gets this option, too" if narrowed else ""
    console().print(Text(f"{model}: {sizes.token} bytes a token ({layers}{why})"))
    blended = f"documents can be blended by vLLM with lmc ({facts.architectures[0]})"
    if not TESTED.keys() & set(facts.architectures):
        blended += ", if the model passes the self-test at start: this architecture has not been tested"
    no = f"documents cannot be blended, and only equal prefixes of prompts are reused: {facts.unblended}"
    console().print(Text(no if facts.unblended else blended))
    console().print(Text("\n".join([*_lines(sizes), *map(printable, corpus.warnings)])))


def _lengths(corpus: "Corpus", tokenizer: Any, positions: int, split: bool) -> list[int]:
    """Return the numbers of tokens of the documents that the model can learn; the others join the skipped ones."""
    from lmc.blend.markers import special_tokens
    from lmc.commands.learn.learners import RESERVED_TOKENS
    from lmc.commands.learn.run import parts_of

    def tokens(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    special, longest, lengths = special_tokens(tokenizer), max(positions - RESERVED_TOKENS, 1), list[int]()
    for document in corpus.documents:
        texts = [document.text]
        if split and positions:
            texts = parts_of(document.text, longest, lambda text: len(tokens(text)))
        for ids in map(tokens, texts):
            if not ids:
                corpus.skipped[document.id] = "the model's tokenizer makes no tokens of it"
            elif special.intersection(ids):
                corpus.skipped[document.id] = "it has special tokens of the model, as a conversation does"
            elif positions and len(ids) > longest:
                hint = f"--split cuts it into parts of at most {longest}"
                corpus.skipped[document.id] = (
                    f"it has {len(ids)} tokens, and the model has {positions} positions; {hint}"
                )
            else:
                lengths.append(len(ids))
    return lengths


def _lines(sizes: Size) -> list[str]:
    from lmc.shapes import GIB, MIB

    slots = int(sizes.memory // sizes.slot)
    memory = f"memory, {sizes.memory / GIB:g} GB: {slots} chunks of up to {sizes.chunk_tokens} tokens"
    disk = f"disk, {sizes.disk / GIB:g} GB" if sizes.disk else "no disk tier (local_disk is not set)"
    if not sizes.documents:
        return [memory, f"{disk}: {sizes.disk / sizes.token:.0f} tokens" if sizes.disk else disk]
    mean = sizes.on_disk / sizes.documents
    need = f"{sizes.documents} documents of {sizes.shortest} to {sizes.longest} tokens, {sizes.tokens} together: "
    per_document = sizes.slots * sizes.slot / sizes.documents / MIB
    per_million = MILLION / sizes.documents / GIB
    return [
        f"{need}{sizes.on_disk / GIB:.2f} GB on a disk, {mean / MIB:.2f} MB each; {MANY_DOCUMENTS} like them: "
        f"{mean * MANY_DOCUMENTS / GIB:.1f} GB",
        f"{memory}, {sizes.fit_in_memory} such documents, which take whole chunks ({per_document:.2f} MB each)",
        f"{disk}: {sizes.fit_on_disk} such documents" if sizes.disk else disk,
        f"known documents, {sizes.max_index / GIB:g} GB of memory (max_document_index_size): "
        f"{sizes.known} such documents",
        f"index of {MILLION} such documents: {sizes.index * per_million:.1f} GB of memory, "
        f"{sizes.disk_index * per_million:.1f} GB on a disk",
    ]
