#include "byte_pairs.h"

#include <algorithm>
#include <queue>
#include <string>
#include <string_view>
#include <vector>

namespace trivet {
namespace {

constexpr uint32_t kNone = UINT32_MAX;

struct Merge {
  uint32_t rank = kNone;
  uint32_t product = kNone;
};

Merge find_merge(const BytePairTables& t, uint32_t left, uint32_t right) {
  const uint32_t* end = t.right + t.first[left + 1];
  const uint32_t* found = std::lower_bound(t.right + t.first[left], end, right);
  if (found == end || *found != right) return {};
  return {t.rank[found - t.right], t.product[found - t.right]};
}

std::string_view spelling(const BytePairTables& t, uint32_t id) {
  const uint32_t start = id == 0 ? 0 : t.text_end[id - 1];
  return {reinterpret_cast<const char*>(t.text) + start, t.text_end[id] - start};
}

// The token that is spelled like the whole word, or kNone.
uint32_t find_word(const BytePairTables& t, const uint32_t* ids, int64_t n) {
  thread_local std::string word;
  word.clear();
  for (int64_t i = 0; i < n; i++) word += spelling(t, ids[i]);
  const uint32_t* end = t.by_text + t.num_words;
  const auto less = [&](uint32_t id, std::string_view w) { return spelling(t, id) < w; };
  const uint32_t* found = std::lower_bound(t.by_text, end, std::string_view(word), less);
  return found != end && spelling(t, *found) == word ? *found : kNone;
}

// One word. Lowest rank first, leftmost of equals; a pair that waits in the queue counts while the tokens that are
// there by then would become the same product.
class Word {
 public:
  int64_t merge(const BytePairTables& tables, uint32_t* ids, int64_t n) {
    tables_ = &tables;
    symbols_.resize(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; i++) symbols_[i] = {ids[i], i - 1, i + 1 < n ? i + 1 : -1};
    for (int64_t i = 0; i + 1 < n; i++) push(i);
    while (!queue_.empty()) {
      const Candidate top = queue_.top();
      queue_.pop();
      Symbol& left = symbols_[top.at];
      if (left.id == kNone || left.next < 0) continue;
      Symbol& right = symbols_[left.next];
      if (find_merge(tables, left.id, right.id).product != top.product) continue;
      left.id = top.product;
      right.id = kNone;
      left.next = right.next;
      if (left.next >= 0) symbols_[left.next].previous = top.at;
      if (left.previous >= 0) push(left.previous);
      push(top.at);
    }
    int64_t count = 0;
    for (int64_t i = 0; i >= 0; i = symbols_[i].next) ids[count++] = symbols_[i].id;
    return count;
  }

 private:
  struct Symbol {
    uint32_t id;  // kNone: merged into the one before
    int64_t previous, next;
  };
  struct Candidate {
    uint32_t rank;
    uint32_t product;
    int64_t at;
    bool operator<(const Candidate& other) const {  // the queue's top is its largest
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };

  void push(int64_t at) {
    if (symbols_[at].next < 0) return;
    const Merge merge = find_merge(*tables_, symbols_[at].id, symbols_[symbols_[at].next].id);
    if (merge.product != kNone) queue_.push({merge.rank, merge.product, at});
  }

  const BytePairTables* tables_ = nullptr;
  std::vector<Symbol> symbols_;
  std::priority_queue<Candidate> queue_;
};

}  // namespace

int64_t merge_byte_pairs(const BytePairTables& tables, uint32_t* ids, const double* words, int64_t n) {
  Word word;
  int64_t count = 0;
  for (int64_t begin = 0, end; begin < n; begin = end) {
    for (end = begin + 1; end < n && words[end] == words[begin]; end++) {
    }
    int64_t size = end - begin;
    if (size > 1) {
      const uint32_t whole = tables.whole_words != 0 ? find_word(tables, ids + begin, size) : kNone;
      if (whole != kNone) {
        ids[begin] = whole;
        size = 1;
      } else {
        size = word.merge(tables, ids + begin, size);
      }
    }
    std::copy_n(ids + begin, size, ids + count);
    count += size;
  }
  return count;
}

}  // namespace trivet
