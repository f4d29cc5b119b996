"""KV pages: free list, reference counts, and a prefix index of hash-chained pages with LRU eviction.

Every page is in exactly one of three states: *used* (one or more requests hold it), *cached* (nobody holds
it, the prefix index can still give it out), *free*. `check` asserts it. Page 0 is scratch and no pool's. A
pool may get pages of more devices, and give them back: those in use leave as they come free. The index key
of a page is a hash over its own 16 tokens and all before them; a hit compares the tokens themselves, so that
a collision can not hand out foreign KV. A *guest* is an indexed page whose KV was fetched from another pool
for requests that are to come, or that is to be forgotten: it may be evicted like any other, and is free when
the last request is done that holds it or is to come.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from muxk.actors.page_chain import PAGE_BYTES, Chain, Entry
from muxk.actors.page_ranges import meet, mixed, without
from muxk.kernel.work import PAGE_SIZE

AUDITED_PAGES = 2048
"""Of a larger pool in use not all are looked at in one moment between two steps: 57,000 take 5 to 10 ms."""
MATCHED_TOGETHER = 16
"""Pages that are hashed at once while they are looked up; those behind the last hit for nothing."""


@dataclass(slots=True)
class Filling:
    """Full pages that the requests of one prefill batch are going to fill, by key.

    They share them before they are filled: a prefill computes its tokens in order, and writes a layer's keys
    and values before any row of the same pass reads them.
    """

    pages: dict[bytes, tuple[int, Entry]] = field(default_factory=dict)


class PagePool:
    """A range of pages, or several. All token columns are int32 bytes."""

    def __init__(self, pages: range) -> None:
        if not pages or pages[0] < 1:
            raise ValueError(f"a KV pool needs a page, and can not give out page 0: got {pages}")
        self.total = 0
        """Pages that it may give out, in whatever state."""
        self._ranges: list[range] = []
        self._leaving: list[range] = []
        """Given back, with pages in use."""
        self._free: deque[int] = deque()
        self._references = [0] * pages.stop
        self._entries: dict[int, Entry] = {}
        self._index: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._held: dict[int, list[int]] = {}
        self._found: dict[int, int] = {}
        self._chains: dict[int, Chain] = {}
        """Of requests that hold pages."""
        self._indexed: dict[int, int] = {}
        """Of each that was published: so many pages at its front are in the index, and stay while it holds
        them."""
        self._guests: dict[int, dict[int, None]] = {}
        """Each with the requests that are still to come for it."""
        self._expected: dict[int, list[int]] = {}
        """Guests by such a request, as they were when it was announced."""
        self._audited = 0
        """Pages of requests that `audit` has looked at."""
        self.add(pages)

    def add(self, pages: range) -> None:
        """Pages of another device, none of which is in the pool or leaving it."""
        assert not any(meet(pages, other) for other in (*self._ranges, *self._leaving)), pages
        self._references += [0] * (pages.stop - len(self._references))
        self._ranges.append(pages)
        self._free = mixed(self._free, pages)
        self.total += len(pages)

    def give_back(self, pages: range) -> None:
        """Give out no page of this range any more, one of those that were added."""
        self._ranges.remove(pages)
        self.total -= len(pages)
        self._free = without(self._free, pages) if self._ranges else deque()
        for page in [page for page in self._cached if page in pages]:
            del self._cached[page]
            self._unindex(page)
        for page in [page for page in self._entries if page in pages]:
            self._unindex(page)
        self._leaving.append(pages)

    def left(self) -> list[range]:
        """Ranges that were given back and of which no page is in use any more; each is told once."""
        gone = [pages for pages in self._leaving if not any(self._references[pages.start : pages.stop])]
        self._leaving = [pages for pages in self._leaving if pages not in gone]
        return gone

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        """Of `total`: pages that are leaving are not counted."""
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Pages that an allocation can take: free, or only cached."""
        return self.free + self.cached

    @property
    def holders(self) -> int:
        """Requests that hold pages."""
        return len(self._held)

    @property
    def expected(self) -> int:
        """Requests that are to come for a prefix that was fetched for them."""
        return len(self._expected)

    def pages_of(self, request_id: int) -> tuple[int, ...]:
        """Pages of a request in the order of its tokens; empty for an unknown one."""
        return tuple(self._held.get(request_id, ()))

    def reserve(
        self,
        request_id: int,
        tokens: bytes,
        spare: int,
        reusable: int | None = None,
        filling: Filling | None = None,
    ) -> int | None:
        """Give a request pages for all its tokens and one more.

        Returns the number of tokens at the front whose KV is in the pages, or will be before it is read (see
        `Filling`): at most `reusable`, and always less than all. None when fewer than `spare` pages would
        stay available.
        """
        assert request_id not in self._held, "a request's pages have one owner"
        count = len(tokens) // 4
        most = count - 1 if reusable is None else min(reusable, count - 1)
        chain = Chain(tokens)
        matched = self._match(chain, 4 * most // PAGE_BYTES, filling)
        needed = count // PAGE_SIZE + 1 - len(matched)
        revived = sum(self._references[page] == 0 for page in matched)
        if self.available - revived < needed + spare:
            return None
        self._hold(request_id, chain, matched, needed)
        self.came(request_id)
        if filling is not None:
            for page, entry in zip(self._held[request_id], chain.first(chain.pages), strict=False):
                if entry.key not in self._index:
                    filling.pages.setdefault(entry.key, (page, entry))
        return len(matched) * PAGE_SIZE

    def _hold(self, request_id: int, chain: Chain, matched: list[int], needed: int) -> None:
        """These pages of the index, and so many new ones behind them."""
        for page in matched:
            self._take(page)
        self._found[request_id] = len(matched)
        self._held[request_id] = matched + self._allocated(needed)
        self._chains[request_id] = chain

    # --- prefixes that move between pools ---

    def pin(self, request_id: int, tokens: bytes, most: int) -> tuple[int, ...]:
        """Hold at most so many indexed pages at the front of these tokens; nothing where there are none."""
        assert request_id not in self._held, "a request's pages have one owner"
        chain = Chain(tokens)
        matched = self._match(chain, most, None)
        if matched:
            self._hold(request_id, chain, matched, 0)
        return tuple(matched)

    def make_room(self, request_id: int, tokens: bytes, spare: int) -> int | None:
        """Hold a page for each full page of tokens: those of the index, and new ones for the others.

        Returns how many were in the index. None, and it holds nothing, when fewer than `spare` pages would
        stay available.
        """
        assert request_id not in self._held, "a request's pages have one owner"
        chain = Chain(tokens)
        matched = self._match(chain, chain.pages, None)
        needed = chain.pages - len(matched)
        revived = sum(self._references[page] == 0 for page in matched)
        if self.available - revived < needed + spare:
            return None
        self._hold(request_id, chain, matched, needed)
        return len(matched)

    def keep_for(self, request_id: int, pages: int) -> None:
        """So many pages that the request holds are filled: it lets go of all, and comes back for these."""
        held, found, chain = self._held[request_id], self._found[request_id], self._chains[request_id]
        self.publish(request_id, chain.front(pages))
        expected = self._expected[request_id] = []
        for place, entry in enumerate(chain.first(pages)):
            page = self._index.get(entry.key)  # another one if another request had it fetched meanwhile
            if page is not None and page == held[place] and place >= found:
                self._guests[page] = {}
            if page is not None and page in self._guests:
                self._guests[page][request_id] = None
                expected.append(page)
        self.release(request_id)

    def came(self, request_id: int) -> None:
        """It holds what it came for, or will never come."""
        for page in self._expected.pop(request_id, ()):
            waiting = self._guests.get(page)
            if waiting is None or request_id not in waiting:
                continue  # evicted in between
            del waiting[request_id]
            if not waiting and not self._references[page]:
                del self._cached[page]
                self._set_free(page)

    def grow(self, request_id: int) -> int | None:
        """One more page for a request; None when there is none, or the request is unknown."""
        pages = self._held.get(request_id)
        if pages is None or self.available == 0:
            return None
        page = self._allocate()
        pages.append(page)
        return page

    def publish(self, request_id: int, tokens: bytes) -> None:
        """Index the full pages of a request whose KV is written for these tokens."""
        if request_id not in self._held:
            return
        chain = self._chains[request_id] = self._chains[request_id].grown(tokens)
        index, entries, leaving = self._index, self._entries, bool(self._leaving)
        first, stop = self._indexed.get(request_id, 0), None
        held, found = self._held[request_id], chain.first(chain.pages)
        for place, (page, entry) in enumerate(zip(held[first:], found[first:], strict=False), first):
            if page in entries:
                continue
            if entry.key not in index and not (leaving and self._is_leaving(page)):
                index[entry.key] = page
                entries[page] = entry
            elif stop is None:
                stop = place  # another page has its place in the index, for as long as that is kept
        self._indexed[request_id] = min(len(held), len(found)) if stop is None else stop

    def forget(self, request_id: int) -> None:
        """Take pages out of the index that a request filled by itself, as soon as nobody else holds them.

        What it found there stays: others put it there, and may come back for it.
        """
        pages = self._held.get(request_id, [])
        self._indexed.pop(request_id, None)
        for page in pages[self._found.get(request_id, 0) :]:
            if page not in self._entries:
                continue
            if self._references[page] == 1:
                self._unindex(page)
            else:
                self._guests.setdefault(page, {})

    def keep(self, request_id: int, tokens: bytes) -> None:
        """Index the full pages of a request, and let them stay when it has gone."""
        self.publish(request_id, tokens)
        for page in self._held.get(request_id, ()) if self._guests else ():
            if self._guests.get(page) == {}:
                del self._guests[page]

    def _unindex(self, page: int) -> None:
        del self._index[self._entries.pop(page).key]
        if self._guests:
            self._guests.pop(page, None)

    def release(self, request_id: int) -> bool:
        """Take back what a request holds; False if it holds nothing (released before, or never known)."""
        pages = self._held.pop(request_id, None)
        if pages is None:
            return False
        del self._found[request_id], self._chains[request_id]
        self._indexed.pop(request_id, None)
        # Last page first: eviction takes the oldest, and a chain is of no use without its beginning.
        references, entries, guests = self._references, self._entries, self._guests
        for page in reversed(pages):
            left = references[page] = references[page] - 1
            assert left >= 0, "a page was released twice"
            if left:
                continue
            if page in entries and not (guests and guests.get(page) == {}):
                self._cached[page] = None
            else:
                self._set_free(page)
        return True

    def _is_leaving(self, page: int) -> bool:
        return bool(self._leaving) and any(page in pages for pages in self._leaving)

    def audit(self) -> None:
        """`check`, or of a large pool in use a part of it, each time another."""
        if self.total <= AUDITED_PAGES or not self._held:
            self.check()
            return
        assert self.used >= 0, "pages are free twice"
        last = self._audited + AUDITED_PAGES
        held = itertools.chain.from_iterable(self._held.values())
        looked_at = 0
        for page in itertools.islice(held, self._audited, last):
            assert self._references[page] > 0, f"nobody holds page {page}, which a request has"
            assert page not in self._cached, f"page {page} is held and cached"
            looked_at += 1
        self._audited = last if looked_at == AUDITED_PAGES else 0

    def check(self) -> None:
        """Assert that no page is lost, shared by mistake or indexed wrongly."""
        counted = [0] * len(self._references)
        for pages in self._held.values():
            for page in pages:
                counted[page] += 1
        assert counted == self._references, "reference counts differ from what requests hold"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert free.isdisjoint(self._cached), "a page is free and cached"
        held_too = [page for page in (*self._free, *self._cached) if counted[page]]
        assert not held_too, f"page {held_too[0]} is held and free or cached"
        held = [page for page, count in enumerate(counted) if count]
        in_use = len(held) - sum(map(self._is_leaving, held)) if self._leaving else len(held)
        assert in_use + self.free + self.cached == self.total, "pages were lost"
        # Both were filled in the same order, in which they are compared with no look-up for each page.
        assert list(self._index.values()) == list(self._entries), "an index entry has no page"
        keys = [entry.key for entry in self._entries.values()]
        assert list(self._index) == keys, "a page is indexed under a foreign key"
        for page, waiting in self._guests.items():
            assert page in self._entries, f"page {page} is a guest and is not indexed"
            assert waiting or self._references[page], f"nobody comes for page {page}"

    def _match(self, chain: Chain, most: int, filling: Filling | None) -> list[int]:
        """Longest chain of at most so many pages at the front that are indexed, or filled by this batch."""
        pages: list[int] = []
        while len(pages) < most:
            for wanted in chain.first(min(most, len(pages) + MATCHED_TOGETHER))[len(pages) :]:
                found = self._find(wanted.key, filling)
                if found is None:
                    return pages
                page, entry = found
                if entry.tokens != wanted.tokens or entry.parent != wanted.parent:
                    return pages
                pages.append(page)
        return pages

    def _find(self, key: bytes, filling: Filling | None) -> tuple[int, Entry] | None:
        page = self._index.get(key)
        if page is not None:
            return page, self._entries[page]
        return None if filling is None else filling.pages.get(key)

    def _take(self, page: int) -> None:
        if self._references[page] == 0:
            del self._cached[page]
        self._references[page] += 1

    def _allocate(self) -> int:
        [page] = self._allocated(1)
        return page

    def _allocated(self, count: int) -> list[int]:
        """So many pages, which are there, for one request to hold."""
        free, references = self._free, self._references
        pages = [free.popleft() for _ in range(min(count, len(free)))]
        while len(pages) < count:
            page, _ = self._cached.popitem(last=False)
            self._unindex(page)
            pages.append(page)
        for page in pages:
            assert references[page] == 0
            references[page] = 1
        return pages

    def _set_free(self, page: int) -> None:
        if page in self._entries:
            self._unindex(page)
        if not self._is_leaving(page):
            self._free.append(page)
