"""The client of a Mooncake Store, with deadlines.

Mooncake's own client blocks its caller: for 30 s if a host that has an object does not respond, for 20 s if the master
does not, and for 90 s at the start without a master (version 0.3.13). So its calls run in threads, and callers wait for
a deadline. A call that was given up, or has failed, may still write into its memory later. So each call has a buffer of
its own, whose bytes are copied, and never a slot of the slab. Codes are those of Mooncake's `types.h`.
"""

import ctypes
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from lmc.config.mooncake_url import MooncakeURL
from lmc.shapes import MIB
from lmc.storage.tiers.record import pages

# Otherwise each object and each client is logged. This counts if nothing else in this process has loaded the library.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

T = TypeVar("T")
FULL = -200  # Mooncake's code for a lack of memory
EXISTS = -705
# Codes for an object that is missing, is being written, or whose lease has ended before its bytes had arrived.
MISSING = frozenset({-704, -703, -707})
# After these codes, nothing is in flight any more. After others, Mooncake may still use the memory of a call.
AT_REST = MISSING | {FULL, EXISTS, -600, -900, -901}
THREADS = 8  # calls at the same time
BUFFER_BYTES = 8 * MIB
BUFFERS = 32  # that reads have at the same time
KEPT_BYTES = 256 * MIB  # of buffers that are not in use
QUARANTINE_SECONDS = 120.0  # after which a buffer that may be in use by a failed call is used again
SETUP_SECONDS = 30.0  # to register the memory that this process gives to the store
STOP_SECONDS = 2.0  # that the client has to sign off


class Failed(OSError):
    """A call that Mooncake answered with an error. `code` is its number."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: error {code}")
        self.code = code


class Buffer:
    """Memory that is registered with the network devices."""

    def __init__(self, store: Any, size: int) -> None:
        self.view, self._store = pages(size), store
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        code = store.register_buffer(self.address, size)
        if code != 0:
            raise OSError(f"memory cannot be registered ({code})")

    def drop(self) -> None:
        """Release the memory."""
        self._store.unregister_buffer(self.address)


class Buffers:
    """The buffers of one client. Any thread may call any method."""

    def __init__(self) -> None:
        self.in_use = 0
        self._free: list[Buffer] = []
        self._quarantined: deque[tuple[float, Buffer]] = deque()  # with the times at which they are free again
        self._mutex = threading.Lock()

    def take(self, store: Any, size: int) -> Buffer:
        """Return a buffer of at least `size` bytes."""
        with self._mutex:
            self.in_use += 1
            while self._quarantined and self._quarantined[0][0] <= time.monotonic():
                self._free.append(self._quarantined.popleft()[1])
            fitting = [buffer for buffer in self._free if len(buffer.view) >= size]
            if fitting:
                smallest = min(fitting, key=lambda buffer: len(buffer.view))
                self._free.remove(smallest)
                return smallest
        try:
            return Buffer(store, -(-size // BUFFER_BYTES) * BUFFER_BYTES)
        except BaseException:
            with self._mutex:
                self.in_use -= 1
            raise

    def give_back(self, buffer: Buffer, call: "Future[Any]") -> None:
        """Make the buffer of a call that has ended available to others, at once or after a quarantine."""
        error = None if call.cancelled() else call.exception()
        answers = [error] if error or call.cancelled() else (call.result() or {}).values()
        at_rest = all(answer.code in AT_REST for answer in answers if isinstance(answer, Failed))
        dropped = []
        with self._mutex:
            self.in_use -= 1
            if at_rest:
                self._free.append(buffer)
            else:
                self._quarantined.append((time.monotonic() + QUARANTINE_SECONDS, buffer))
            while sum(len(one.view) for one in self._free) > KEPT_BYTES:
                dropped.append(self._free.pop(0))
        for one in dropped:
            one.drop()


Heads = dict[str, tuple[int, bytes] | Failed]  # sizes and first bytes of objects by name; missing ones are left out


class PoolClient:
    """The client of one Mooncake Store."""

    def __init__(self, url: MooncakeURL, deadline: float) -> None:
        """Create a client that is not connected. `deadline` is in seconds."""
        self.name, self.deadline = str(url), deadline
        self._url, self._threads = url, ThreadPoolExecutor(THREADS, "lmc-mooncake")
        self._store: Any = None
        self._setup: Future[Any] | None = None
        self._buffers = Buffers()
        self._settings = ReplicateConfig()
        self._settings.replica_num = url.replica_num

    def connect(self) -> None:
        """Connect, unless this has been done, and ask the master for a response. Raises `OSError` without one."""
        try:
            socket.create_connection((self._url.master, self._url.port), self.deadline).close()
        except OSError as error:
            raise OSError(f"{self.name}: {error.strerror or error}") from None
        if self._store is None:
            self._setup = self._setup or self.begin(self._set_up)
            try:
                self._store = self._answer(self._setup, SETUP_SECONDS)
            finally:
                if self._setup.done():
                    self._setup = None
        self.exist(["lmc"], self.deadline)

    def begin(self, call: Callable[..., T], *arguments: object) -> "Future[T]":
        """Begin a call in a thread."""
        return self._threads.submit(call, *arguments)

    def exist(self, names: Sequence[str], within: float) -> list[bool]:
        """Return for each object whether it exists."""
        codes = self._answer(self.begin(self._store.batch_is_exist, list(names)), within)
        return [self._found(code) for code in codes]  # -900 is true.

    def heads(self, names: Sequence[str], size: int) -> "Future[Heads]":
        """Request the sizes and the first `size` bytes of objects."""
        buffer = self._buffers.take(self._store, size * len(names))
        call = self.begin(self._heads, buffer, list(names), size)
        call.add_done_callback(lambda call: self._buffers.give_back(buffer, call))
        return call

    def range(self, name: str, start: int, stop: int, *, now: bool) -> "RangeRequest | None":
        """Request bytes of an object, at most `BUFFER_BYTES`.

        Returns None while all buffers are in use, unless the bytes are needed `now`.
        """
        if self._buffers.in_use >= BUFFERS and not now:
            return None
        buffer = self._buffers.take(self._store, BUFFER_BYTES)
        return RangeRequest(
            self, self._buffers, buffer, self.begin(self._range, buffer, name, start, stop), stop - start
        )

    def head(self, answer: "Future[Heads]", name: str) -> tuple[int, bytes]:
        """Return the size and the first bytes of an object, from the answer to a request.

        Raises `FileNotFoundError` for a missing object, `TimeoutError` without an answer, `OSError` for other errors.
        """
        found = self._answer(answer, self.deadline).get(name)
        if found is None:
            raise FileNotFoundError(name)
        if isinstance(found, Failed):
            raise found
        return found

    def wait_for(self, answer: "Future[None]") -> None:
        """Wait for the bytes of an object. Raises the same errors."""
        self._answer(answer, self.deadline)

    def put(self, name: str, parts: Sequence[memoryview | bytes], within: float) -> bool:
        """Store an object. Returns false if it existed. Raises `MemoryError` if the store has no memory for it."""
        size, at = sum(map(len, parts)), 0
        buffer = self._buffers.take(self._store, size)
        for part in parts:
            buffer.view[at : at + len(part)] = part
            at += len(part)
        call = self.begin(self._put, buffer, name, size)
        call.add_done_callback(lambda call: self._buffers.give_back(buffer, call))
        try:
            self._answer(call, within)
        except Failed as error:
            if error.code == FULL:
                raise MemoryError from None
            if error.code != EXISTS:
                raise
            return False
        return True

    def remove(self, name: str) -> bool:
        """Remove an object, also one that is being read. Returns false if it was missing."""
        code = self._answer(self.begin(self._store.remove, name, True), self.deadline)
        if code != 0 and code not in MISSING:
            raise Failed(self.name, code)
        return bool(code == 0)

    def size(self, name: str) -> int:
        """Return an object's size in bytes; 0 for a missing one."""
        return max(0, int(self._answer(self.begin(self._store.get_size, name), self.deadline)))

    def close(self) -> None:
        """Sign off. Calls in flight end later."""
        if self._store is not None:
            with suppress(OSError):
                self._answer(self.begin(self._store.close), STOP_SECONDS)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- in the threads ----------------------------------------------------------------------------------------------

    def _set_up(self) -> Any:
        url, store = self._url, MooncakeDistributedStore()
        host = url.local_hostname or _address_towards(url)
        code = store.setup(
            host, url.metadata_server, url.global_segment_size, url.local_buffer_size, url.protocol, url.device_name,
            url.master_address,
        )  # fmt: skip
        if code != 0:
            raise OSError(f"{self.name}: its client cannot be set up ({code}); it says why on standard error")
        return store

    def _heads(self, buffer: Buffer, names: list[str], size: int) -> "Heads":
        sizes = {name: self._store.get_size(name) for name in names}
        lengths = {name: min(found, size) for name, found in sizes.items() if found > 0}
        heads: Heads = {
            name: Failed(self.name, code) for name, code in sizes.items() if code < 0 and code not in MISSING
        }
        if not lengths:
            return heads
        places = [at * size for at in range(len(lengths))]
        ranges = [[[at] for at in places]], [[[0] for _ in places]], [[[length] for length in lengths.values()]]
        (answers,) = self._store.get_into_ranges([buffer.address], [list(lengths)], *ranges)
        for (name, length), at, (code,) in zip(lengths.items(), places, answers, strict=True):
            if code == length:
                heads[name] = sizes[name], bytes(buffer.view[at : at + code])
            elif code not in MISSING:
                heads[name] = Failed(self.name, code)
        return heads

    def _range(self, buffer: Buffer, name: str, start: int, stop: int) -> None:
        ranges = [[[0]]], [[[start]]], [[[stop - start]]]
        (((code,),),) = self._store.get_into_ranges([buffer.address], [[name]], *ranges)
        if code in MISSING:
            raise FileNotFoundError(name)
        if code != stop - start:
            raise Failed(self.name, code)

    def _put(self, buffer: Buffer, name: str, size: int) -> None:
        code = self._store.put_from(name, buffer.address, size, self._settings)
        if code != 0:
            raise Failed(self.name, code)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _answer(self, future: "Future[T]", within: float) -> T:
        try:
            return future.result(within)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(f"{self.name}: no answer in {within:g} s") from None

    def _found(self, code: int) -> bool:
        """Return whether an object was found. Raises `Failed` for other errors."""
        if code < 0 and code not in MISSING:
            raise Failed(self.name, code)
        return code > 0


def _address_towards(url: MooncakeURL) -> str:
    """Return the address of this host on the way to the master."""
    family, kind, _, _, address = socket.getaddrinfo(url.master, url.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:  # This sends nothing.
        towards.connect(address)
        return str(towards.getsockname()[0])


class RangeRequest:
    """A request for bytes of an object."""

    def __init__(self, client: PoolClient, buffers: Buffers, buffer: Buffer, call: "Future[None]", size: int) -> None:
        self._client, self._buffers, self._buffer, self._call, self._size = client, buffers, buffer, call, size

    def bytes(self) -> memoryview:
        """Return the bytes, which are valid until `close`. Raises the errors of `PoolClient.wait_for`."""
        self._client.wait_for(self._call)
        return self._buffer.view[: self._size]

    def close(self) -> None:
        """Give the buffer back, as soon as nothing writes into it any more."""
        self._call.cancel()
        self._call.add_done_callback(lambda call: self._buffers.give_back(self._buffer, call))
