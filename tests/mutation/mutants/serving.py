"""Pages of keys and rings of earlier queries."""

from __future__ import annotations

from ..mutant import Mutant

RINGS, APPEND, ROWS = "mtagen/serving.py", "mtagen/ops/append.py", "mtagen/ops/row_kernels.py"
COPIES, REQUESTS = "mtagen/ops/copies.py", "mtagen/ops/requests.py"
BATCHING = "mtagen/transformers/batching.py"
SERVING, PAGED = "tests/test_serving.py", "tests/test_paged.py"

MUTANTS = (
    Mutant(
        "rings-are-read-after-the-step",
        RINGS,
        "torch.where(is_replaced, REPLACED, place)",
        "place",
        "New queries have taken the slots of earlier ones in the page that a request goes on filling.",
        (SERVING,),
    ),
    Mutant(
        "rings-are-read-before-the-step",
        APPEND,
        "x.rings[_pages_and_rows(places.queries[stored], slots)] = x.q[stored]",
        "x.rings[_pages_and_rows(places.queries[stored], slots)], x = x.q[stored], x._replace(rings=x.rings.clone())",
        "A shared page that another request fills in the same step is read before it is full.",
        (SERVING,),
    ),
    Mutant(
        "kernels-move-no-replaced-queries",
        ROWS,
        "if replaced_row >= 0:",
        "if replaced_row < -1:",
        "Triton's kernel overwrites earlier queries that the request needs.",
        ("tests/interpreter/test_rings.py",),
    ),
    Mutant(
        "rings-have-no-spare-slots",
        RINGS,
        "spec.context + spare if spec.context else 0, heads",
        "spec.context, heads",
        "After tokens are taken back, their queries have overwritten what the next ones need.",
        (SERVING,),
    ),
    Mutant(
        "rings-keep-the-first-queries-of-a-step",
        RINGS,
        "is_real & (end - position <= rings.slots)",
        "is_real & (position % size < rings.slots)",
        "Of tokens that share a slot not the last one stays.",
        (SERVING,),
    ),
    Mutant(
        "rings-before-the-start-are-read",
        RINGS,
        "torch.where(position < 0, BEFORE_START, place)",
        "place",
        "What a ring holds of other tokens counts as queries before the first token.",
        (SERVING,),
    ),
    Mutant(
        "padding-is-stored",
        RINGS,
        "is_real & (end - position <= rings.slots)",
        "end - position <= rings.slots",
        "Tokens after the last request overwrite the rings of its pages.",
        (SERVING,),
    ),
    Mutant(
        "rings-overlap-keys",
        RINGS,
        "pages.storage_offset() + held",
        "pages.storage_offset() + held - head_dim",
        "A ring in the padding of a page begins before the page's last value ends.",
        (SERVING,),
    ),
    Mutant(
        "padding-is-stored-in-pages",
        RINGS,
        "torch.where(is_real, page * size + place, NOWHERE)",
        "page * size + place",
        "Tokens after the last request overwrite the keys and values of its first page.",
        (SERVING,),
    ),
    Mutant(
        "keys-of-the-next-page",
        COPIES,
        "block_table[request, place // size], 0)",
        "block_table[request, (place + 1) // size], 0)",
        "The last key of a page is read from the page after it.",
        (PAGED,),
    ),
    Mutant(
        "slots-behind-the-last-key-are-read",
        REQUESTS,
        "torch.cat([ends.new_zeros(1), ends])",
        "torch.cat([ends.new_zeros(1), ends + 1])",
        "Requests see what the places after their last keys hold.",
        (PAGED,),
    ),
    Mutant(
        "rows-before-the-start-count",
        COPIES,
        "q=call.q.masked_fill(before[:, None, None], 0)",
        "q=call.q",
        "What stands in rows before a request's start, which may be NaN, changes its results.",
        (PAGED,),
    ),
    Mutant(
        "earlier-rows-are-results",
        REQUESTS,
        "row = query + (request + 1) * context",
        "row = query + request * context",
        "Results begin with those of the earlier queries.",
        (PAGED,),
    ),
    Mutant(
        "kernels-take-earlier-rows-as-results",
        ROWS,
        "row = (query + (request + 1) * CONTEXT).to(tl.int64)",
        "row = (query + request * CONTEXT).to(tl.int64)",
        "Results of chunks begin with those of the earlier queries.",
        ("tests/interpreter/test_paged.py",),
    ),
    Mutant(
        "kernels-count-keys-from-each-block",
        ROWS,
        "total + tl.cumsum(others, 0)",
        "tl.cumsum(others, 0)",
        "Keys of requests after the first 1024 begin where those of other requests lie.",
        ("tests/interpreter/test_paged.py",),
    ),
    Mutant(
        "caches-of-the-next-page",
        COPIES,
        "block_table[:, place // size], 0)",
        "block_table[:, (place + 1) // size], 0)",
        "The last key of a page is read from the page after it, in steps of single tokens.",
        (PAGED,),
    ),
    Mutant(
        "blocks-are-copied-without-rings",
        BATCHING,
        "copy(sources, targets)\n        then(sources, targets)",
        "copy(sources, targets)",
        "Samples of one prompt begin without the prompt's last queries.",
        ("tests/test_batching.py::test_several_samples_of_a_prompt",),
    ),
)
