#pragma once

#include "ptx.cuh"

// ---- Dropout -------------------------------------------------------------------------------------------------------
//
// What is kept is a function of a seed and of the place of a probability; mtagen/dropout.py defines it.

constexpr int GROUP = 16;  // keys that one draw serves

// The group of a key, which may lie before the first one.
DEVICE int group_of(int key) { return key >> 4; }

// The 64 bits of a product. Of operands that are made wider first, ptxas would add zeros to the upper half.
DEVICE u64 multiply_wide(u32 x, u32 y) {
  u64 product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(x), "r"(y));
  return product;
}

struct Dropout {
  u32 key[2], offset;  // of the seed
  u32 own, shared;     // of the threshold: the upper 7 bits in each byte; the lower 8 bits, four bits apart

  DEVICE Dropout(const long long* seed, int threshold) : own((threshold >> 8) * 0x01010101u), shared(threshold & 0xff) {
    shared = (shared | shared << 12) & 0x000f000fu;
    shared = (shared | shared << 6) & 0x03030303u;
    shared = (shared | shared << 3) << 3 & 0x88888888u;
    const long long first = __ldg(seed), second = __ldg(seed + 1);
    key[0] = static_cast<u32>(first);
    key[1] = static_cast<u32>(first >> 32) ^ static_cast<u32>(second >> 32);
    offset = static_cast<u32>(second);
  }

  // Which are kept of the keys of a group, of a row of a slot, the number of the head through the batch. Of word w bits
  // 7 and 23 tell it of keys 2 w and 2 w + 1, bits 15 and 31 of keys 2 w + 8 and 2 w + 9.
  DEVICE void keep(u32 (&kept)[4], u32 slot, u32 row, u32 group) const {
    u32 c[4] = {group, row, slot, offset}, k[2] = {key[0], key[1]};
#pragma unroll
    for (int round = 0; round < 7; ++round) {
      const u64 x = multiply_wide(0xD2511F53u, c[0]), y = multiply_wide(0xCD9E8D57u, c[2]);
      c[0] = static_cast<u32>(y >> 32) ^ c[1] ^ k[0], c[1] = static_cast<u32>(y);
      c[2] = static_cast<u32>(x >> 32) ^ c[3] ^ k[1], c[3] = static_cast<u32>(x);
      k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u;
    }
    // A byte is dropped if it is less than its part of the threshold, or as much while what all share is less.
    const u32 least = own + ((c[0] & SIGNS | (c[1] & SIGNS) >> 4) < shared ? 0x01010101u : 0u);
#pragma unroll
    for (int w = 0; w < 4; ++w) kept[w] = (c[w] | SIGNS) - least;  // no byte borrows from the next
  }

  // The same as 16 bits, in the order of the keys.
  DEVICE u32 keep_bits(u32 slot, u32 row, u32 group) const {
    u32 kept[4], even = 0;  // of a byte, one more than the even bits: the keys of words 0 to 3
    keep(kept, slot, row, group);
#pragma unroll
    for (int w = 0; w < 4; ++w) even |= (kept[w] & SIGNS) >> (6 - 2 * w);
    return (even >> 1 | even >> 16) & 0xffffu;
  }

  // The same of a chunk, 8 keys: bits 15 and 31 of word w tell of keys 2 w and 2 w + 1.
  DEVICE void keep_chunk(u32 (&kept)[4], u32 slot, u32 row, u32 chunk) const {
    keep(kept, slot, row, chunk / 2);
#pragma unroll
    for (int w = 0; w < 4; ++w) kept[w] <<= chunk & 1 ? 0 : 8;
  }

 private:
  static constexpr u32 SIGNS = 0x80808080u;
};

// Four bytes, each all ones or zeros as the upper bit of a byte of x, 0 to 3, or of y, 4 to 7, is set; digits of
// `bytes` say of which.
DEVICE u32 signs_of_bytes(u32 x, u32 y, u32 bytes) {
  u32 signs;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(signs) : "r"(x), "r"(y), "r"(bytes | 0x8888u));
  return signs;
}

// All ones in each half of a word whose upper bit is set, else zeros.
DEVICE u32 halves_of_bits(u32 kept) { return signs_of_bytes(kept, 0u, 0x3311); }

// Of a line, a chunk of a row in 16 bits a key, the keys that are not kept become zeros.
DEVICE void drop(u32 (&line)[4], const Dropout& dropout, u32 slot, u32 row, u32 chunk) {
  u32 kept[4];
  dropout.keep_chunk(kept, slot, row, chunk);
#pragma unroll
  for (int w = 0; w < 4; ++w) line[w] &= halves_of_bits(kept[w]);
}
