#pragma once

#include "ptx.cuh"

// ---- Dropout -------------------------------------------------------------------------------------------------------
//
// What is kept is a function of a seed and of the place of a probability; mtagen/dropout.py defines it.

struct Dropout {
  u32 key[2], offset;  // of the seed
  u32 threshold;       // less than this is dropped, in each half

  DEVICE Dropout(const long long* seed, int threshold) : threshold(threshold * 0x10001u) {
    const long long first = __ldg(seed), second = __ldg(seed + 1);
    key[0] = static_cast<u32>(first);
    key[1] = static_cast<u32>(first >> 32) ^ static_cast<u32>(second >> 32);
    offset = static_cast<u32>(second);
  }

  // Which are kept of keys 8 `group` to 8 `group` + 7, of a row of a slot, the number of the head through the batch.
  // Bit 15 of word w tells it of key 2 w, bit 31 of the next.
  DEVICE void keep(u32 (&kept)[4], u32 slot, u32 row, u32 group) const {
    u32 c[4] = {group, row, slot, offset}, k[2] = {key[0], key[1]};
#pragma unroll
    for (int round = 0; round < 7; ++round) {
      const u64 x = static_cast<u64>(0xD2511F53u) * c[0], y = static_cast<u64>(0xCD9E8D57u) * c[2];
      c[0] = static_cast<u32>(y >> 32) ^ c[1] ^ k[0], c[1] = static_cast<u32>(y);
      c[2] = static_cast<u32>(x >> 32) ^ c[3] ^ k[1], c[3] = static_cast<u32>(x);
      k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u;
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) kept[w] = (c[w] | 0x80008000u) - threshold;  // no half borrows from the other
  }

  // The same of that group and of the next as 16 bits, in the order of the keys.
  DEVICE u32 keep_bits(u32 slot, u32 row, u32 group) const {
    u32 bytes[2];  // in the upper 8 bits
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      u32 kept[4];
      keep(kept, slot, row, group + g);
      // Bits 7, 15, 23 and 31 tell of keys 0 to 3, or 4 to 7; then bits 8 x + 3 and 8 x + 7 of keys x and x + 4.
      const u32 low = __byte_perm(kept[0], kept[1], 0x7531), high = __byte_perm(kept[2], kept[3], 0x7531);
      const u32 both = low >> 4 & 0x08080808u | high & 0x80808080u;
      bytes[g] = both * (1u << 21 | 1u << 14 | 1u << 7 | 1u);  // no two bits meet in a place
    }
    return __byte_perm(bytes[0], bytes[1], 0x4473);
  }
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

// Of a line, 8 keys of a row in 16 bits each, those that are not kept become zeros.
DEVICE void drop(u32 (&line)[4], const Dropout& dropout, u32 slot, u32 row, u32 group) {
  u32 kept[4];
  dropout.keep(kept, slot, row, group);
#pragma unroll
  for (int w = 0; w < 4; ++w) line[w] &= halves_of_bits(kept[w]);
}
