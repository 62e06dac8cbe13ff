"""PrefixCache: keys and values of prefixes of prompts, kept in blocks of tokens and reused by later calls."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fuseopt.generation.engine.state import CacheShape, DecodeState
from fuseopt.generation.prompt.prompts import is_aligned, store
from fuseopt.runtime.host_copy import HostCopy
from fuseopt.runtime.memory import is_out_of_memory
from fuseopt.runtime.written_values import WeightVersions

BLOCK = 16
"""Tokens in a block."""
_BLOCK_BYTES = BLOCK * torch.int64.itemsize
_MIB = 2**20
# Blocks in more runs of neighbouring places are copied by one kernel, which reads the places from the device.
_MOST_COPIES = 3

_Key = tuple[int, bytes]
"""The number of the previous block, 0 for none, and the token ids of the block. Equal keys mean equal ids from position
0 on, since no two blocks have the same number."""


class _Block(NamedTuple):
    """A cached block: its number, and its place in the pool."""

    number: int
    place: int


class _Row(NamedTuple):
    """One prompt: the masked tokens before it, its ids as bytes of int64, and its cached blocks."""

    padding: int
    ids: bytes
    chain: Sequence[_Key]
    places: Sequence[int]


class PrefixMatch(NamedTuple):
    """The cached prefixes of the prompts of a call.

    Attributes:
        start: how many slots of the state are filled from the cache, with the padding before the prompts.
        saved: tokens of all rows that need not run.
        rows: the prompts.
    """

    start: int
    saved: int
    rows: Sequence[_Row]

    @property
    def note(self) -> str:
        """For the report."""
        return f"{self.saved} prompt tokens from the prefix cache" if self.saved else ""


class PrefixCache:
    """LRU cache of keys and values of prompts, in blocks of 16 tokens.

    A block is looked up by its token ids and those of all blocks before it, which are compared and not only hashed. Its
    keys and values are therefore those of the same tokens at the same positions. All blocks are in one pool, allocated
    when the first prompt is cached. Source: the block tables of PagedAttention (Kwon et al. 2023, arXiv 2309.06180);
    here blocks are copied to the state of a call.

    Args:
        mebibytes: largest size of the pool.
        weight_versions: returns what changes with the weights; None if changes cannot be seen.

    Attributes:
        shape: of the model's cache, from the first prompt on.
    """

    def __init__(self, mebibytes: int, weight_versions: Callable[[], WeightVersions | None]) -> None:
        self.mebibytes, self._weight_versions = mebibytes, weight_versions
        self._versions: WeightVersions | None = None
        self._samples: Hashable = None
        self._numbers = itertools.count(1)
        self._skips_next = False
        self._reused: int | None = None
        self.forget()

    def __len__(self) -> int:
        """How many blocks are cached."""
        return len(self._blocks)

    def forget(self) -> None:
        """`clear`, and the counts for the report start anew."""
        self.shape: CacheShape | None = None
        self._calls = self._hits = self._saved = 0
        self.clear()

    def clear(self) -> None:
        """Drops all blocks, and frees the pool."""
        # The last used is last. A block is used after the blocks that follow it, so those are evicted first.
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()
        self._free: list[int] = []
        self._pool: Tensor | None = None

    def give_back(self) -> None:
        """Frees the pool after memory has run out; the next prompt runs without it."""
        self._skips_next = self._skips_next or self._pool is not None
        self.clear()

    def begin_call(self) -> None:
        """To be called before a call of generate() runs its prompts."""
        self._reused = None

    def end_call(self) -> None:
        """Counts a call for the report. If it ran its prompts again, after an early prefill, the first time counts."""
        if self._reused is not None:
            self._calls, self._hits, self._saved = (
                self._calls + 1,
                self._hits + bool(self._reused),
                self._saved + self._reused,
            )
        self._reused = None

    def find(
        self, shape: CacheShape, input_ids: Tensor, keep: Tensor | None, positions: Tensor | None
    ) -> PrefixMatch | str:
        """The cached prefix of each prompt, or why the cache is not used. Waits for `input_ids`.

        A prefix is valid only if `confirmed` returns it.

        Args:
            shape: of the model's cache.
            input_ids, keep, positions: as for `DecodeState.load_prompt`.
        """
        self.shape = shape
        if shape.stored_dtype is not None:
            return "a prompt attends to its keys and values before they are rounded to 8 bits"
        if self._skips_next:
            self._skips_next = False
            return "its memory was freed, since memory ran out"
        if not self.capacity:
            return f"a block takes {shape.bytes_per_slot * BLOCK / _MIB:.2f} of {self.mebibytes} MiB"
        on_host = HostCopy(input_ids, torch.int64)
        versions = self._weight_versions()
        if versions is None:
            return "writes to weights made in inference mode cannot be seen"
        if self._versions is None or versions.known != self._versions.known:
            self.clear()
        self._versions = versions
        length = input_ids.shape[1]
        paddings = _paddings(input_ids, keep, positions)
        if isinstance(paddings, str):
            return paddings
        rows = []
        for ids, padding in zip(on_host.read(), paddings, strict=True):
            held = ids[padding:].numpy().tobytes()
            chain = self._chain(held)
            rows.append(_Row(padding, held, chain, [self._blocks[key].place for key in chain]))
        # At least one token runs, since it gives the first logits.
        start = min(length - 1, *(row.padding + BLOCK * len(row.places) for row in rows))
        saved = sum(max(0, start - row.padding) for row in rows)
        return PrefixMatch(start if saved else 0, saved, rows)

    def confirmed(self, match: PrefixMatch) -> PrefixMatch:
        """Waits for the samples of the weights that `find` has begun to read, and drops all blocks if they changed.

        Returns:
            `match` if its blocks are of these weights; else one without blocks, with which the prompt has to run again.
        """
        assert self._versions is not None, "`find` has set them"
        samples = self._versions.sampled()
        if samples == self._samples:
            return match
        self.clear()
        self._samples = samples
        if not match.saved:
            return match
        self._reused = 0
        return PrefixMatch(0, 0, [row._replace(chain=(), places=()) for row in match.rows])

    def load(self, match: PrefixMatch, state: DecodeState, before: Sequence[_Row]) -> None:
        """Fills the first `match.start` slots of `state.cache`, and sets `state.start`.

        Args:
            before: `state.prompts` before this prompt, whose keys and values are not copied again.
        """
        if self._reused is None:
            self._reused = match.saved
        state.start = match.start
        for row, cache, last in itertools.zip_longest(match.rows, state.cache.unbind(2), before):
            # Attention multiplies the values of padding by 0, and 0 * NaN is NaN.
            if row.padding:
                cache[:, :, :, : min(row.padding, match.start)].zero_()
            if last is None or not _shares(last, row, match.start):
                _copy(self._pool, row.places, cache[:, :, :, row.padding : match.start], to_pool=False)

    def store(self, match: PrefixMatch, state: DecodeState) -> str:
        """Caches the blocks of the prompts in `state` that are not cached yet; returns why it could not, or "".

        If that raises an error, the cache is empty, since blocks are found before their keys and values are copied.
        """
        try:
            return self._store(match, state)
        except BaseException:
            self.clear()
            raise

    def report_lines(self) -> Iterator[str]:
        """The size of the cache and the prompt tokens reused so far; nothing before the first prompt."""
        if self.shape is not None:
            held = len(self) * BLOCK * self.shape.bytes_per_slot / _MIB
            reused = f"{self._hits} of {self._calls} calls reused {self._saved} prompt tokens"
            yield (
                f"prefix cache: {held:.1f} of {self.mebibytes} MiB in {len(self)} blocks of {BLOCK} tokens; "
                f"{reused if self._calls else 'no call could use it'}"
            )

    @property
    def capacity(self) -> int:
        """The most blocks that fit into the pool."""
        assert self.shape is not None
        return self.mebibytes * _MIB // (self.shape.bytes_per_slot * BLOCK)

    def _store(self, match: PrefixMatch, state: DecodeState) -> str:
        if self._pool is None and any(len(row.ids) >= _BLOCK_BYTES for row in match.rows):
            try:
                self._allocate(state)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return f"there was no memory for a prefix cache of {self.mebibytes} MiB"
        stored = []
        for row, cache in zip(match.rows, state.cache.unbind(2), strict=True):
            first, places, chain = self._insert(row)
            _copy(self._pool, places, cache[:, :, :, row.padding + first * BLOCK :], to_pool=True)
            stored.append(row._replace(chain=chain))
        state.prompts = stored
        return ""

    def _allocate(self, state: DecodeState) -> None:
        layers, two, _, heads, _, head_dim = state.cache.shape
        # A tensor made in inference mode cannot be written to outside it. On a CPU the system provides a page when it
        # is first written.
        with torch.inference_mode(False):
            self._pool = state.cache.new_empty(layers, two, heads, self.capacity * BLOCK, head_dim)
        self._free = list(reversed(range(self.capacity)))

    def _chain(self, ids: bytes, known: Sequence[_Key] = ()) -> list[_Key]:
        """The keys of the longest chain of cached blocks that `ids` begin with.

        Args:
            known: what this returned earlier for the same ids. If its last block is still cached, all of it is.
        """
        found = list(known) if known and known[-1] in self._blocks else []
        number = self._blocks[found[-1]].number if found else 0
        for key_ids in _split(ids, len(found)):
            key = number, key_ids
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(key)
            number = block.number
        return found

    def _insert(self, row: _Row) -> tuple[int, Sequence[int], Sequence[_Key]]:
        """Marks the blocks of a prompt as used, and adds those that are not cached, as many as fit into the pool.

        Returns:
            how many blocks were cached; the places of the added ones, which follow them; the keys of all.
        """
        chain = self._chain(row.ids, row.chain)
        first, number = len(chain), self._blocks[chain[-1]].number if chain else 0
        self._use(chain)
        new = list(_split(row.ids, first))
        # The blocks of this prompt are the most recently used.
        while len(self._free) < len(new) and len(self._blocks) > first:
            self._free.append(self._blocks.popitem(last=False)[1].place)
        count = min(len(new), len(self._free))
        # Neighbouring places are copied at once.
        places = sorted(self._free[len(self._free) - count :])
        del self._free[len(self._free) - count :]
        for key_ids, place in zip(new, places, strict=False):
            chain.append((number, key_ids))
            number = next(self._numbers)
            self._blocks[chain[-1]] = _Block(number, place)
        self._use(chain)
        return first, places, chain

    def _use(self, chain: Sequence[_Key]) -> None:
        for key in reversed(chain):
            self._blocks.move_to_end(key)


def _split(ids: bytes, first: int) -> Iterator[bytes]:
    """The ids of each full block from the block `first` on."""
    return (ids[end - _BLOCK_BYTES : end] for end in range((first + 1) * _BLOCK_BYTES, len(ids) + 1, _BLOCK_BYTES))


def _shares(last: _Row, row: _Row, start: int) -> bool:
    """Whether two prompts have the same padding, and the same blocks up to slot `start`."""
    count = -(-(start - row.padding) // BLOCK)
    return (
        last.padding == row.padding and 0 < count <= len(last.chain) and last.chain[count - 1] == row.chain[count - 1]
    )


def _copy(pool: Tensor | None, places: Sequence[int], slots: Tensor, *, to_pool: bool) -> None:
    """Copies blocks of `pool` to `slots` [layers, 2, kv_heads, any, head_dim], or from there.

    Args:
        places: of the blocks that `slots` begin with. `slots` may end within a block, and have more slots than blocks.
    """
    length = min(len(places) * BLOCK, slots.shape[3])
    if pool is None or not length:
        return
    places = places[: -(-length // BLOCK)]
    runs, whole = _runs(places), length // BLOCK
    if len(runs) > _MOST_COPIES and whole:
        numbers = torch.tensor(places[:whole], device=pool.device)
        in_slots, in_pool = _wide_blocks(slots[:, :, :, : whole * BLOCK], pool)
        if to_pool:
            in_pool.index_copy_(3, numbers, in_slots)
        else:
            torch.index_select(in_pool, 3, numbers, out=in_slots)
        runs = [(whole, 1)] if length % BLOCK else []
    for index, count in runs:
        begin, end, first = index * BLOCK, min((index + count) * BLOCK, length), places[index] * BLOCK
        of_slots, of_pool = slots[:, :, :, begin:end], pool[:, :, :, first : first + end - begin]
        store(*((of_pool, of_slots) if to_pool else (of_slots, of_pool)))


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """The runs of neighbouring places, each as the index of its first one and their number."""
    if places == [*range(places[0], places[0] + len(places))]:
        return [(0, len(places))]
    groups = itertools.groupby(range(len(places)), lambda index: places[index] - index)
    return [(run[0], len(run)) for run in ([*group] for _, group in groups)]


def _wide_blocks(*tensors: Tensor) -> list[Tensor]:
    """Views [layers, 2, kv_heads, blocks, any] of [layers, 2, kv_heads, slots, head_dim], with elements of 16 bytes if
    that is possible for all of them."""
    blocks = [tensor.unflatten(3, (-1, BLOCK)).flatten(4) for tensor in tensors]
    ratio = torch.complex128.itemsize // blocks[0].dtype.itemsize
    return (
        [each.view(torch.complex128) for each in blocks] if all(is_aligned(each, ratio) for each in blocks) else blocks
    )


def _paddings(input_ids: Tensor, keep: Tensor | None, positions: Tensor | None) -> list[int] | str:
    """Masked tokens before each prompt; or why the prompts' keys and values depend on more than ids and positions."""
    rows, length = input_ids.shape
    if keep is None and positions is None:
        return [0] * rows
    slots, counts = torch.arange(length, device="cpu"), torch.full((rows,), length, device="cpu")
    if keep is not None:
        kept = keep[:, :length].cpu().bool()
        counts = kept.sum(dim=1)
        if not torch.equal(kept, slots >= (length - counts)[:, None]):
            return "the attention mask excludes tokens after the first of a prompt"
    expected = slots - (length - counts)[:, None]
    positions = slots if positions is None else positions.cpu()
    if ((positions != expected) & (expected >= 0)).any():
        return "position_ids do not count up from 0 in each prompt"
    paddings: list[int] = (length - counts).tolist()
    return paddings
