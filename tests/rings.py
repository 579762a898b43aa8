"""A model of rings: requests of an engine, and the queries of each request in a list."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtagen.serving import Rings, Step

CONTEXT, HEADS, WIDTH, PAGES = 5, 2, 3, 300  # of (6, 11); a query has WIDTH numbers here


class Engine:
    """Requests of an engine with rings.

    A token's key is its query, and its value begins with it. All are views of one tensor, as projections are.
    """

    def __init__(self, size: int, spare: int) -> None:
        self.rings = Rings(torch.full((PAGES, CONTEXT + spare, HEADS, WIDTH), torch.nan), size, CONTEXT)
        self.k_pages = torch.full((PAGES, size, HEADS, WIDTH), torch.nan)
        self.v_pages = torch.full((PAGES, size, HEADS, WIDTH + 1), torch.nan)
        self.size, self.spare, self.free = size, spare, list(range(PAGES))
        self.untouched = set(self.free)
        self.tables: list[list[int]] = []
        self.queries: list[list[Tensor]] = []
        self.longest: list[int] = []  # that each request ever was
        self.drawn = torch.Generator().manual_seed(0)

    def begin(self, shared: int = 0, of: int = 0) -> None:
        """Add a request that begins with some full pages of another."""
        self.tables.append(self.tables[of][:shared] if shared else [])
        self.queries.append(self.queries[of][: shared * self.size] if shared else [])
        self.longest.append(len(self.queries[-1]))

    def fork(self, of: int) -> None:
        """Add a request that goes on as another does: it shares full pages, and has a copy of the last."""
        full = len(self.queries[of]) // self.size
        self.begin(full, of)
        self.queries[-1], self.longest[-1] = [*self.queries[of]], self.longest[of]
        if len(self.tables[of]) > full:
            source, target = self.tables[of][full], self._take()
            self.tables[-1].append(target)
            for pages in (self.k_pages, self.v_pages):
                pages[target] = pages[source]
            self.rings.copy_pages(torch.tensor([source]), torch.tensor([target]))

    def evict(self, request: int) -> None:
        """Remove a request."""
        table = self.tables.pop(request)
        del self.queries[request], self.longest[request]
        self._give_back(table)

    def remove(self, request: int, count: int) -> None:
        """Take back the last tokens of a request."""
        kept = len(self.queries[request]) - count
        del self.queries[request][kept:]
        pages = -(-kept // self.size)
        table = self.tables[request]
        self.tables[request] = table[:pages]
        self._give_back(table[pages:])

    def removable(self, request: int) -> int:
        """Return how many tokens can be taken back: spare ones that lie in pages of this request alone."""
        others = {page for number, table in enumerate(self.tables) if number != request for page in table}
        shared = sum(page in others for page in self.tables[request])
        length = len(self.queries[request])
        return max(0, min(self.spare - self.longest[request] + length, length - shared * self.size))

    def step(
        self, counts: Sequence[int], new: Sequence[Tensor] = (), hits: Sequence[int] = (), padding: int = 0
    ) -> None:
        """Take the next tokens of all requests, and check their rows and what pages hold.

        Args:
            counts: new tokens of each request.
            new: their queries; drawn by default.
            hits: requests whose pages, as they are after the step, begin requests that this step adds.
            padding: tokens after the last request.
        """
        counts, drawn = [*counts], [*new] or [self._draw(count) for count in counts]
        for request, count in enumerate(counts):
            while len(self.tables[request]) * self.size < len(self.queries[request]) + count:
                self.tables[request].append(self._take())
        for request in hits:
            filled = [*self.queries[request], *drawn[request]]
            full = len(filled) // self.size
            self.begin()
            self.tables[-1], self.queries[-1] = [*self.tables[request][:full], self._take()], filled[: full * self.size]
            counts.append(2)
            drawn.append(self._draw(2))
        past = [[*queries] for queries in self.queries]
        for request, rows in enumerate(drawn):
            self.queries[request] += rows
            self.longest[request] = max(self.longest[request], len(self.queries[request]))
        packed = torch.cat([*drawn, self._draw(padding)]).repeat(1, 1, 2)
        q, v = packed[..., :WIDTH], packed[..., : WIDTH + 1]
        step = self._places(counts, len(packed))
        rows = self.rings.append(q, step, k=q, v=v, k_pages=self.k_pages, v_pages=self.v_pages)
        got = rows.split([*(count + CONTEXT for count in counts), padding])[: len(counts)]
        for mine, before, own in zip(got, past, drawn, strict=True):
            earlier = [torch.zeros(HEADS, WIDTH)] * CONTEXT + before
            assert torch.equal(mine, torch.cat([torch.stack(earlier[-CONTEXT:]), own])), "earlier queries"
        for table, queries in zip(self.tables, self.queries, strict=True):
            expected = torch.stack([torch.zeros(HEADS, WIDTH), *queries])[1:]
            for pages in (self.k_pages, self.v_pages):
                assert torch.equal(pages[table].flatten(0, 1)[: len(queries), :, :WIDTH], expected)
        for held in (self.rings.queries, self.k_pages, self.v_pages):
            assert held[[*self.untouched]].isnan().all()

    def _places(self, counts: Sequence[int], total: int) -> Step:
        width = max(map(len, self.tables), default=0)
        tables = torch.tensor([table + [-1] * (width + 1 - len(table)) for table in self.tables], dtype=torch.int32)
        lengths = torch.tensor([len(queries) for queries in self.queries], dtype=torch.int32)
        cu_seq_q = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        return Step.of_tables(self.rings, cu_seq_q, lengths, total, tables)

    def _draw(self, count: int) -> Tensor:
        return torch.randn(count, HEADS, WIDTH, generator=self.drawn)

    def _take(self) -> int:
        self.untouched.discard(self.free[-1])
        return self.free.pop()

    def _give_back(self, pages: Sequence[int]) -> None:
        self.free += [page for page in pages if not any(page in table for table in self.tables)]
