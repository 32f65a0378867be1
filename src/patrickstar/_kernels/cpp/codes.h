// 8-bit codes of Adam's states: the operations of `_kernels/adam_8bit.py`. Included by `loops.cpp`, which is compiled
// once per instruction set.
#pragma once

#include "formats.h"

namespace patrickstar {
namespace {

constexpr uint32_t INFINITE = 0x7f800000u;
constexpr float SQUARE_OFFSET = 0x1p-50f, RATIO_OFFSET = 0x1p-12f;
constexpr uint32_t SQUARE_WORD = (127 - 50) << 23, RATIO_WORD = (127 - 12) << 23;
constexpr int SQUARE_SHIFT = 21, RATIO_SHIFT = 20, ROOT_SHIFT = 3;
constexpr uint32_t LEAST_ROOT = 25, ONE = 127;

// Replaces codes of one strip by the states.
void decode_states(const uint8_t* __restrict ratios, const uint8_t* __restrict squares, int64_t count,
                   float* __restrict exp_avgs, float* __restrict exp_avg_sqs) {
    for (int64_t i = 0; i < count; i++) {
        const float square = bits<float>((uint32_t{squares[i]} << SQUARE_SHIFT) + SQUARE_WORD) - SQUARE_OFFSET;
        const float ratio = bits<float>((uint32_t{ratios[i]} % 128 << RATIO_SHIFT) + RATIO_WORD) - RATIO_OFFSET;
        const float exp_avg = ratio * bits<float>(((squares[i] >> ROOT_SHIFT) + ONE - LEAST_ROOT) << 23);
        exp_avgs[i] = ratios[i] >= 128 ? -exp_avg : exp_avg;
        exp_avg_sqs[i] = square;
    }
}

inline uint32_t to_code(float shifted, uint32_t offset_word, uint32_t random, int shift, uint32_t largest) {
    uint32_t word = bits<uint32_t>(shifted) & 0x7fffffffu;
    word = word > INFINITE ? INFINITE : word;
    const uint32_t code = (word - offset_word + random) >> shift;
    return code > largest ? largest : code;
}

// Rounds the states of one strip to codes, up or down with random bits from a hash of the new masters.
void encode_states(const float* __restrict masters, const float* __restrict exp_avgs,
                   const float* __restrict exp_avg_sqs, float seed, int64_t count, uint8_t* __restrict ratios,
                   uint8_t* __restrict squares) {
    const uint32_t mask = static_cast<uint32_t>(seed) << 8;
    for (int64_t i = 0; i < count; i++) {
        uint32_t hash = bits<uint32_t>(masters[i]) ^ mask;
        hash = (hash ^ hash >> 16) * 0x7feb352du;
        hash = (hash ^ hash >> 15) * 0x846ca68bu;
        hash = hash ^ hash >> 16;
        const uint32_t random = hash & ((1u << SQUARE_SHIFT) - 1);
        const uint32_t code = to_code(exp_avg_sqs[i] + SQUARE_OFFSET, SQUARE_WORD, random, SQUARE_SHIFT, 255);
        const float exp_avg = exp_avgs[i], inverse = bits<float>((ONE + LEAST_ROOT - (code >> ROOT_SHIFT)) << 23);
        const float ratio = __builtin_fabsf(exp_avg) * inverse + RATIO_OFFSET;
        const uint32_t other = hash * 0x9e3779b1u >> (32 - RATIO_SHIFT);
        const uint32_t magnitude = to_code(ratio, RATIO_WORD, other, RATIO_SHIFT, 127);
        squares[i] = static_cast<uint8_t>(code);
        ratios[i] = static_cast<uint8_t>(exp_avg < 0 ? magnitude + 128 : magnitude);
    }
}

}  // namespace
}  // namespace patrickstar
