// Split masters: a bfloat16 parameter and the lower 16 bits of its master. See [Note: split masters] in
// `_kernels/split_masters.py`. Included by `loops.cpp`, which is compiled once per instruction set.
#pragma once

#include "formats.h"

namespace patrickstar {
namespace {

constexpr uint32_t HALF = 0x8000u, SIGN = 0x80000000u;
#if defined(__AVX512F__)
constexpr bool ONE_PASS = true;
#else
constexpr bool ONE_PASS = false;
#endif

// True if a master may lie between two parameters: one strip in 128, if digits are random.
inline bool has_ties(const uint16_t* __restrict lowers, int64_t count) {
    uint16_t found = 0;
    for (int64_t i = 0; i < count; i++) found |= lowers[i] == HALF ? 1 : 0;
    return found != 0;
}

// Returns the master if it is no tie: rounded up if its lower half is larger than a half.
inline float join_untied(uint16_t upper, uint16_t lower) {
    const uint32_t word = lower;
    return bits<float>((uint32_t{upper} << 16) - ((word << 1) & 0x10000u) + word);
}

// Restores masters, and takes the marks of ties off the second moments.
inline void join_marked(const uint16_t* __restrict uppers, const uint16_t* __restrict lowers, int64_t count,
                        float* __restrict masters, float* __restrict moments) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t lower = lowers[i], moment = bits<uint32_t>(moments[i]);
        // A mark makes the lower half of a tie larger than a half.
        const uint32_t rounded_up = (lower + (moment >> 31) + 0x7fffu) & 0x10000u;
        masters[i] = bits<float>((uint32_t{uppers[i]} << 16) - rounded_up + lower);
        moments[i] = bits<float>(moment & ~SIGN);
    }
}

// The halves of a master whose NaN is the canonical one, which needs no rounding.
inline uint16_t upper_of(float master) {
    const uint32_t word = bits<uint32_t>(master);
    return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);  // to nearest, ties to even
}
inline uint16_t lower_of(float master) { return static_cast<uint16_t>(bits<uint32_t>(master)); }

// Marks second moments of masters that are odd and a half, which are rounded up.
inline void mark_ties(const float* __restrict masters, int64_t count, float* __restrict moments) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t mark = (bits<uint32_t>(masters[i]) & 0x1ffffu) == 0x18000u ? SIGN : 0u;
        moments[i] = bits<float>(bits<uint32_t>(moments[i]) | mark);
    }
}

}  // namespace
}  // namespace patrickstar
