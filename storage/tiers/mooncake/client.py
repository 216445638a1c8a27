"""The client of a Mooncake Store, with deadlines.

Mooncake's own client blocks its caller: for 30 s if a host that has an object does not respond, for 20 s if the master
does not, and for minutes when it is set up (version 0.3.13). So its calls run in threads, and callers wait for a
deadline. To set a client up also blocks all other threads, so another process tries it first.

A call that was given up, or has failed, may still write into its memory later. So each call has a buffer of its own,
whose bytes are copied, and never a slot of the slab. Codes are those of Mooncake's `types.h`.
"""

import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from lmc.config.mooncake_url import MooncakeURL
from lmc.shapes import MIB
from lmc.storage.tiers.record import pages

# Otherwise each object and each client is logged. This counts if nothing else in this process has loaded the library.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

from mooncake.store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction

T = TypeVar("T")
FULL = -200  # Mooncake's code for a lack of memory
EXISTS = -705
# Codes for an object that is missing, is being written, or whose lease has ended before its bytes had arrived.
MISSING = frozenset({-704, -703, -707})
# After these codes, nothing is in flight. After others, Mooncake may still use the memory of a call. It also may if an
# object is missing only after some time: its host did not respond, and the master has removed it meanwhile.
AT_REST = MISSING | {FULL, EXISTS, -600, -900, -901}
AT_ONCE_SECONDS = 1.0
THREADS = 8  # calls at the same time that move bytes
ASKING_THREADS = 2  # calls at the same time that only ask the master
BUFFER_BYTES = 8 * MIB
BUFFERS = 32  # maximum number of buffers that reads have at the same time
KEPT_BYTES = 256 * MIB  # limit for the buffers that are not in use
QUARANTINE_SECONDS = 120.0  # A buffer that a failed call may still use is used again after this time.
SETUP_SECONDS = 15.0  # timeout for another process to set up a client, and again to register memory given to the store
STOP_SECONDS = 2.0  # time that calls in flight have to end before the client signs off
TRIAL = """
import json, os, sys
from mooncake.store import MooncakeDistributedStore
host, metadata, *network = json.load(sys.stdin)
code = MooncakeDistributedStore().setup(host, metadata, 0, 0, *network)
sys.stderr.write(f"error {code}")
sys.stderr.flush()
os._exit(int(code != 0))
"""


class Failed(OSError):
    """A call that Mooncake answered with an error. `code` is its number."""

    def __init__(self, name: str, code: int, began: float | None = None) -> None:
        """Create the error of a call that moves bytes and began at a time, or of another one."""
        super().__init__(f"{name}: error {code}")
        late = began is not None and time.monotonic() - began > AT_ONCE_SECONDS
        self.code, self.at_rest = code, code in AT_REST and not late


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

    @property
    def busy(self) -> int:
        """The number of buffers that calls use, or may still use."""
        return self.in_use + len(self._quarantined)

    def take(self, store: Any, size: int) -> Buffer:
        """Return a buffer of at least `size` bytes. Raises `OSError` if failed calls may still use many."""
        with self._mutex:
            while self._quarantined and self._quarantined[0][0] <= time.monotonic():
                self._free.append(self._quarantined.popleft()[1])
            if len(self._quarantined) > BUFFERS:
                raise OSError("too many calls have failed and may still use their memory")
            self.in_use += 1
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
        answers = [] if call.cancelled() else [error] if error else list((call.result() or {}).values())
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        at_rest = all(isinstance(one, FileNotFoundError) or getattr(one, "at_rest", False) for one in errors)
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


Heads = dict[str, tuple[int, bytes] | OSError]  # by name; missing objects may be left out


def _settings(url: MooncakeURL, *, soft_pin: bool = False) -> ReplicateConfig:
    """Return how the store keeps an object."""
    settings = ReplicateConfig()
    settings.replica_num = url.replica_num
    if soft_pin:
        settings.soft_pin_action = SoftPinAction.ENABLE
    return settings


class MooncakeClient:
    """The client of one Mooncake Store."""

    def __init__(self, url: MooncakeURL, deadline: float) -> None:
        """Create a client that is not connected. `deadline` is in seconds."""
        self.name, self.deadline = str(url), deadline
        self._url, self._closed = url, False
        self._moving = ThreadPoolExecutor(THREADS, "lmc-mooncake")
        self._asking = ThreadPoolExecutor(ASKING_THREADS, "lmc-mooncake-ask")
        self._store: Any = None
        self._setup: Future[Any] | None = None
        self.buffers = Buffers()
        self._in_flight: set[Future[Any]] = set()  # calls that have begun, also those that were given up
        self._settings, self._pinned = _settings(url), _settings(url, soft_pin=bool(url.soft_pin))

    def connect(self) -> None:
        """Connect, unless this has been done, and ask the master for a response. Raises `OSError` without one."""
        try:
            socket.create_connection((self._url.master, self._url.port), self.deadline).close()
        except OSError as error:
            raise OSError(f"{self.name}: {error.strerror or error}") from None
        if self._store is None:
            self._setup = self._setup or self._begin(self._asking, self._set_up)
            try:
                self._store = self.answer(self._setup, 2 * SETUP_SECONDS)
            finally:
                if self._setup.done():
                    self._setup = None
        self.exist(["lmc"], self.deadline)

    def exist(self, names: Sequence[str], within: float) -> list[bool]:
        """Return for each object whether it exists."""
        codes = self._ask(within, self._store.batch_is_exist, list(names))
        return [self._checked(code) == 1 for code in codes]  # A code such as -900 is not a hit.

    def heads(self, names: Sequence[str], size: int) -> "Future[Heads]":
        """Request the sizes and the first `size` bytes of objects."""
        buffer = self.buffers.take(self._store, size * len(names))
        call = self._move(buffer, self._heads, list(names), size)
        call.add_done_callback(lambda call: self.buffers.give_back(buffer, call))
        return call

    def range(self, name: str, start: int, stop: int, *, now: bool) -> "RangeRequest | None":
        """Request bytes of an object, at most `BUFFER_BYTES`.

        Returns None while all buffers are in use, unless the bytes are needed `now`.
        """
        ahead = self.buffers.busy
        if ahead >= BUFFERS and not now:
            return None
        buffer = self.buffers.take(self._store, BUFFER_BYTES)
        call = self._move(buffer, self._range, name, start, stop)
        # Each turn of the threads may take the deadline.
        return RangeRequest(self, buffer, call, stop - start, self.deadline * (1 + ahead // THREADS))

    def head(self, answer: "Future[Heads]", name: str) -> tuple[int, bytes]:
        """Return the size and the first bytes of an object, from the answer to a request.

        Raises `FileNotFoundError` for a missing object, `TimeoutError` without an answer, `OSError` for other errors.
        """
        found = self.answer(answer, self.deadline).get(name, FileNotFoundError(name))
        if isinstance(found, OSError):
            raise found
        return found

    def answer(self, call: "Future[T]", within: float) -> T:
        """Return the answer to a call. Raises `TimeoutError` without one, and the errors of the call."""
        try:
            return call.result(within)
        except TimeoutError as error:
            if call.done():  # The call itself has ended with this error.
                raise
            call.cancel()
            raise TimeoutError(f"{self.name}: no answer in {within:g} s") from error
        except CancelledError:
            raise OSError(f"{self.name}: closed") from None

    def put(self, name: str, parts: Sequence[memoryview | bytes], within: float, *, is_document: bool = False) -> bool:
        """Store an object. Returns false if it existed. Raises `MemoryError` if the store has no memory for it.

        The store evicts documents after other objects if the option `soft_pin` says so.
        """
        size, at = sum(map(len, parts)), 0
        buffer = self.buffers.take(self._store, size)
        for part in parts:
            buffer.view[at : at + len(part)] = part
            at += len(part)
        call = self._move(buffer, self._put, name, size, self._pinned if is_document else self._settings)
        call.add_done_callback(lambda call: self.buffers.give_back(buffer, call))
        try:
            self.answer(call, within)
        except Failed as error:
            if error.code == FULL:
                raise MemoryError from None
            if error.code != EXISTS:
                raise
            return False
        return True

    def remove(self, name: str) -> bool:
        """Remove an object, also one that is being read. Returns false if it was missing."""
        return self._checked(self._ask(self.deadline, self._store.remove, name, True)) == 0

    def size(self, name: str) -> int:
        """Return an object's size in bytes; 0 for a missing one."""
        return max(0, self._checked(int(self._ask(self.deadline, self._store.get_size, name))))

    def close(self, *, responds: bool) -> None:
        """Sign off if the store `responds` and no call is in flight, which Mooncake would not survive.

        Otherwise calls end later, and the store notices that this process has left.
        """
        self._closed = True
        for threads in (self._moving, self._asking):
            threads.shutdown(wait=False, cancel_futures=True)
        until = time.monotonic() + STOP_SECONDS
        while self._is_busy and time.monotonic() < until:
            time.sleep(STOP_SECONDS / 100)
        if self._store is not None and responds and not self._is_busy:
            self._store.close()

    # -- in the threads ----------------------------------------------------------------------------------------------

    def _set_up(self) -> Any:
        url, store = self._url, MooncakeDistributedStore()
        host = url.local_hostname or _address_towards(url)
        network = url.protocol, url.device_name, url.master_address
        trial = [sys.executable, "-c", TRIAL]
        given = json.dumps([host, url.metadata_server, *network]).encode()  # All users of the host see arguments.
        try:
            subprocess.run(trial, input=given, check=True, timeout=SETUP_SECONDS, capture_output=True)
        except subprocess.CalledProcessError as error:
            raise OSError(f"{self.name}: a client cannot be set up{_last_error(error.stderr)}") from None
        except subprocess.TimeoutExpired as error:
            said = _last_error(error.stderr)
            raise TimeoutError(f"{self.name}: a client is not set up in {SETUP_SECONDS:g} s{said}") from None
        code = store.setup(host, url.metadata_server, url.global_segment_size, url.local_buffer_size, *network)
        if code != 0:
            raise OSError(f"{self.name}: its client cannot be set up ({code}); it says why on standard error")
        return store

    def _heads(self, buffer: Buffer, names: list[str], size: int) -> Heads:
        sizes: dict[str, int] = {}
        for name in names:
            sizes[name] = self._store.get_size(name)
            if self._closed:
                raise OSError(f"{self.name}: closed")
            self._checked(sizes[name])  # If this one fails, the others would take as long.
        lengths = {name: min(found, size) for name, found in sizes.items() if found > 0}
        heads: Heads = {}
        if not lengths:
            return heads
        places = [at * size for at in range(len(lengths))]
        ranges = [[[at] for at in places]], [[[0] for _ in places]], [[[length] for length in lengths.values()]]
        began = time.monotonic()
        (answers,) = self._store.get_into_ranges([buffer.address], [list(lengths)], *ranges)
        for (name, length), at, (code,) in zip(lengths.items(), places, answers, strict=True):
            error = self._error_of(name, code, length, began)
            heads[name] = error or (sizes[name], bytes(buffer.view[at : at + length]))
        return heads

    def _range(self, buffer: Buffer, name: str, start: int, stop: int) -> None:
        ranges, began = ([[[0]]], [[[start]]], [[[stop - start]]]), time.monotonic()
        (((code,),),) = self._store.get_into_ranges([buffer.address], [[name]], *ranges)
        if error := self._error_of(name, code, stop - start, began):
            raise error

    def _error_of(self, name: str, code: int, wanted: int, began: float) -> OSError | None:
        """Return the error of a read that began at a time and was to have `wanted` bytes; None if it has them."""
        if code == wanted:
            return None
        failed = Failed(self.name, code, began)
        return FileNotFoundError(name) if code in MISSING and failed.at_rest else failed

    def _put(self, buffer: Buffer, name: str, size: int, settings: ReplicateConfig) -> None:
        code = self._store.put_from(name, buffer.address, size, settings)
        if code != 0:
            raise Failed(self.name, code)

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        """Whether a call is in flight, or may still use its memory."""
        return bool(self._in_flight or self.buffers.busy)

    def _begin(self, threads: ThreadPoolExecutor, call: Callable[..., T], *arguments: object) -> "Future[T]":
        """Begin a call in a thread. Raises `OSError` if no thread can be started, or the client is closed."""
        try:
            begun = threads.submit(call, *arguments)
        except RuntimeError as error:
            raise OSError(f"{self.name}: {error}") from None
        self._in_flight.add(begun)
        begun.add_done_callback(self._in_flight.discard)
        return begun

    def _move(self, buffer: Buffer, call: Callable[..., T], *arguments: object) -> "Future[T]":
        """Begin a call that moves bytes from or to a buffer. Gives the buffer back if the call cannot begin."""
        try:
            return self._begin(self._moving, call, buffer, *arguments)
        except OSError:
            never: Future[T] = Future()
            never.cancel()
            self.buffers.give_back(buffer, never)
            raise

    def _checked(self, code: int) -> int:
        """Return the master's answer about an object. Raises `Failed` for errors, unless the object is missing."""
        if code < 0 and code not in MISSING:
            raise Failed(self.name, code)
        return code

    def _ask(self, within: float, call: Callable[..., T], *arguments: object) -> T:
        """Return the answer of the master. Bytes that move do not delay it."""
        return self.answer(self._begin(self._asking, call, *arguments), within)


def _last_error(said: bytes | None) -> str:
    """Return the last error that Mooncake has logged, without its time and place."""
    errors = re.findall(r"^E\d{4} .*?\] (.*)$", (said or b"").decode(errors="replace"), re.MULTILINE)
    return f": {errors[-1]}" if errors else ""


def _address_towards(url: MooncakeURL) -> str:
    """Return the address of this host on the way to the master."""
    family, kind, _, _, address = socket.getaddrinfo(url.master, url.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:  # This sends nothing.
        towards.connect(address)
        return str(towards.getsockname()[0])


class RangeRequest:
    """A request for bytes of an object."""

    def __init__(self, client: MooncakeClient, buffer: Buffer, call: "Future[None]", size: int, within: float) -> None:
        """Store the call that fills `buffer` with `size` bytes, whose answer is awaited for `within` seconds."""
        self._client, self._buffer, self._call, self._size, self._within = client, buffer, call, size, within

    def bytes(self) -> memoryview:
        """Return the bytes, which are valid until `close`. Raises the errors of `MooncakeClient.head`."""
        self._client.answer(self._call, self._within)
        return self._buffer.view[: self._size]

    def close(self) -> None:
        """Give the buffer back, as soon as nothing writes into it any more."""
        self._call.cancel()
        self._call.add_done_callback(lambda call: self._client.buffers.give_back(self._buffer, call))
