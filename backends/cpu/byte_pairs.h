// The merging of BPE, on the tables of a mapped byte_pairs.bin (backends/contract/byte_pairs.py).
#pragma once

#include <cstdint>

namespace trivet {

struct BytePairTables {
  const uint32_t* first;
  const uint32_t* right;
  const uint32_t* rank;
  const uint32_t* product;
  const uint32_t* text_end;
  const uint32_t* by_text;
  const uint8_t* text;
  uint32_t num_words;
  uint32_t whole_words;
};

// ids[0, n): tokens, one per character; words[i]: the word of token i, neighbours with equal values form one, NaN is a
// word of its own. Merges within words, in place, and returns how many tokens are left.
int64_t merge_byte_pairs(const BytePairTables& tables, uint32_t* ids, const double* words, int64_t n);

}  // namespace trivet
