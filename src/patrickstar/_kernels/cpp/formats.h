// Conversion of 16-bit floats: exact widening, and rounding to nearest, ties to even, by integer operations that every
// instruction set has. Included by `loops.cpp`, which is compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "spans.h"

namespace patrickstar {
namespace {

template <class To, class From>
inline To bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

// Machines differ in which NaN an operation returns; every stored NaN is replaced by this one.
inline float canonical(float value) { return value != value ? bits<float>(0x7fc00000u) : value; }

inline float from_bfloat16(uint16_t half) { return bits<float>(uint32_t{half} << 16); }

inline uint16_t to_bfloat16(float value) {
    const uint32_t word = bits<uint32_t>(value);
    const uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;  // to nearest, ties to even
    return static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

inline float from_float16(uint16_t half) {
    const uint32_t exponents = 0x7c00u << 13;
    uint32_t word = (half & 0x7fffu) << 13;
    const uint32_t exponent = word & exponents;
    word += (127 - 15) << 23;
    const uint32_t infinite = word + ((128 - 16) << 23);
    const uint32_t denormal = bits<uint32_t>(bits<float>(word + (1u << 23)) - bits<float>(113u << 23));
    word = exponent == exponents ? infinite : exponent == 0 ? denormal : word;
    return bits<float>(word | (uint32_t{half} & 0x8000u) << 16);
}

inline uint16_t to_float16(float value) {
    const uint32_t sign = bits<uint32_t>(value) & 0x80000000u;
    const uint32_t word = bits<uint32_t>(value) ^ sign;
    const uint32_t magic = ((127 - 15) + (23 - 10) + 1) << 23;  // adding it shifts the digits of a denormal into place
    const uint32_t denormal = bits<uint32_t>(bits<float>(word) + bits<float>(magic)) - magic;
    const uint32_t normal = (word - ((127u - 15u) << 23) + 0xfffu + ((word >> 13) & 1u)) >> 13;
    const uint32_t large = word > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t half = word >= (143u << 23) ? large : word < (113u << 23) ? denormal : normal;
    return static_cast<uint16_t>(value != value ? 0x7e00u : (half | sign >> 16));
}

void widen(const void* source, int32_t dtype, int64_t first, int64_t count, float* __restrict out) {
    const auto* halves = static_cast<const uint16_t*>(source) + first;
    if (dtype == FLOAT32)
        std::memcpy(out, static_cast<const float*>(source) + first, count * sizeof(float));
    else if (dtype == BFLOAT16)
        for (int64_t i = 0; i < count; i++) out[i] = from_bfloat16(halves[i]);
    else
        for (int64_t i = 0; i < count; i++) out[i] = from_float16(halves[i]);
}

void round_into(void* target, int32_t dtype, int64_t first, int64_t count, const float* __restrict values) {
    auto* __restrict halves = static_cast<uint16_t*>(target) + first;
    if (dtype == FLOAT32)
        std::memcpy(static_cast<float*>(target) + first, values, count * sizeof(float));
    else if (dtype == BFLOAT16)
        for (int64_t i = 0; i < count; i++) halves[i] = to_bfloat16(values[i]);
    else
        for (int64_t i = 0; i < count; i++) halves[i] = to_float16(values[i]);
}

}  // namespace
}  // namespace patrickstar
