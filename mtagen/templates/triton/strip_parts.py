import triton
import triton.language as tl


@triton.jit
def _sum_of_parts(
    partial_ptr, slot, place, inside, outer, slots, inner, entries, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums over the parts of a slot of partial sums (outer, slots, inner, entries): those at BLOCK places, in fp32.

    The order of additions depends on the number of parts only.
    """
    sums = tl.zeros([PARTS, BLOCK], tl.float32)
    for first in range(0, outer * inner, PARTS):
        part = first + tl.arange(0, PARTS)
        exists = (part < outer * inner)[:, None] & inside[None, :]
        begin = ((part // inner * slots + slot) * inner + part % inner).to(tl.int64) * entries
        sums += tl.load(partial_ptr + begin[:, None] + place[None, :], mask=exists, other=0.0)
    return tl.sum(sums, 0)
