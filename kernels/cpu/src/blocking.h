// Loops over blocks of compile-time sizes, so that accumulators stay in registers (register blocking).

#pragma once

#include "common.h"

namespace aiakq {

// A compile-time constant passed as an argument.
template <int V> struct Int {
  static constexpr int value = V;
};

// Blocks of MAX elements or, for the remainder, of SIZES, which descend and end with 1.
template <int MAX, int... SIZES> struct Blocks {
  static constexpr int max = MAX;

  // Calls work(Int<size>, first element) for consecutive blocks from ``begin`` to ``end``, each the largest that fits
  // and has at most LIMIT elements.
  template <int LIMIT = MAX, class Work> INLINE void for_each(int64_t begin, int64_t end, Work work) {
    const auto blocks_of = [&](auto size) INLINE_LAMBDA {
      constexpr int SIZE = decltype(size)::value;
      if constexpr (SIZE <= LIMIT)
        for (; begin + SIZE <= end; begin += SIZE) work(size, begin);
    };
    blocks_of(Int<MAX>{});
    (blocks_of(Int<SIZES>{}), ...);
  }
};

}  // namespace aiakq
