#pragma once

#include "ptx.cuh"

// ---- Dropout -------------------------------------------------------------------------------------------------------
//
// The mask is a function of a seed and of the place of a probability; mtagen/dropout.py defines it.

constexpr int GROUP = 16;  // keys that share one draw

// The group of a key, which may be negative.
DEVICE int group_of(int key) { return key >> 4; }

// The 64 bits of a product. If the operands were widened first, ptxas would add zeros to the upper half.
DEVICE u64 multiply_wide(u32 x, u32 y) {
  u64 product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(x), "r"(y));
  return product;
}

struct Dropout {
  u32 key[2], offset;  // parts of the seed
  u32 upper, lower;    // threshold: its upper 7 bits in each byte; its lower 8 bits, four bits apart

  DEVICE Dropout(const long long* seed, int threshold)
      : upper((threshold >> 8) * 0x01010101u), lower(threshold & 0xff) {
    lower = (lower | lower << 12) & 0x000f000fu;
    lower = (lower | lower << 6) & 0x03030303u;
    lower = (lower | lower << 3) << 3 & 0x88888888u;
    const long long first = __ldg(seed), second = __ldg(seed + 1);
    key[0] = static_cast<u32>(first);
    key[1] = static_cast<u32>(first >> 32) ^ static_cast<u32>(second >> 32);
    offset = static_cast<u32>(second);
  }

  // Draws the mask of a group of keys of a row. `slot` is the number of the head in the whole batch. In word w, bits 7
  // and 23 are set if keys 2 w and 2 w + 1 are kept, bits 15 and 31 if keys 2 w + 8 and 2 w + 9 are kept.
  DEVICE void keep(u32 (&kept)[4], u32 slot, u32 row, u32 group) const {
    u32 c[4] = {group, row, slot, offset}, k[2] = {key[0], key[1]};
#pragma unroll
    for (int round = 0; round < 7; ++round) {
      const u64 x = multiply_wide(0xD2511F53u, c[0]), y = multiply_wide(0xCD9E8D57u, c[2]);
      c[0] = static_cast<u32>(y >> 32) ^ c[1] ^ k[0], c[1] = static_cast<u32>(y);
      c[2] = static_cast<u32>(x >> 32) ^ c[3] ^ k[1], c[3] = static_cast<u32>(x);
      k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u;
    }
    // A key is dropped if its 15-bit number, its own 7 bits first, then the 8 bits that its group shares, is below the
    // threshold. `least` is the smallest 7 bits of a key that is kept.
    const u32 least = upper + ((c[0] & SIGNS | (c[1] & SIGNS) >> 4) < lower ? 0x01010101u : 0u);
#pragma unroll
    for (int w = 0; w < 4; ++w) kept[w] = (c[w] | SIGNS) - least;  // no byte borrows from the next
  }

  // The mask of a group as 16 bits, in the order of the keys.
  DEVICE u32 keep_bits(u32 slot, u32 row, u32 group) const {
    u32 kept[4], even = 0;  // bits 1, 3, 5 and 7 of a byte are those of words 0 to 3
    keep(kept, slot, row, group);
#pragma unroll
    for (int w = 0; w < 4; ++w) even |= (kept[w] & SIGNS) >> (6 - 2 * w);
    return (even >> 1 | even >> 16) & 0xffffu;
  }

  // The mask of a chunk of 8 keys: bits 15 and 31 of word w are those of keys 2 w and 2 w + 1.
  DEVICE void keep_chunk(u32 (&kept)[4], u32 slot, u32 row, u32 chunk) const {
    keep(kept, slot, row, chunk / 2);
#pragma unroll
    for (int w = 0; w < 4; ++w) kept[w] <<= chunk & 1 ? 0 : 8;
  }

 private:
  static constexpr u32 SIGNS = 0x80808080u;
};

// Four bytes, each all ones if the upper bit of a selected byte is set, else zeros. Digits of `bytes` select bytes 0 to
// 3 of x and bytes 4 to 7 of y.
DEVICE u32 signs_of_bytes(u32 x, u32 y, u32 bytes) {
  u32 signs;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(signs) : "r"(x), "r"(y), "r"(bytes | 0x8888u));
  return signs;
}

// A word whose halves are all ones where the upper bit of the half is set, else zeros.
DEVICE u32 halves_of_bits(u32 kept) { return signs_of_bytes(kept, 0u, 0x3311); }

// Sets the dropped keys of a line, a chunk of a row with 16 bits per key, to zeros.
DEVICE void drop(u32 (&line)[4], const Dropout& dropout, u32 slot, u32 row, u32 chunk) {
  u32 kept[4];
  dropout.keep_chunk(kept, slot, row, chunk);
#pragma unroll
  for (int w = 0; w < 4; ++w) line[w] &= halves_of_bits(kept[w]);
}
